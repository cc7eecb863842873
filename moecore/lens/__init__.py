"""Record the routing of any model as a trace (files), and analyse it (``moecore lens``)."""

from moecore.lens.analyses import analyse_trace as analyse_trace
from moecore.lens.traces import LayerRouting as LayerRouting
from moecore.lens.traces import Trace as Trace
from moecore.lens.traces import TraceWriter as TraceWriter
from moecore.lens.traces import write_trace as write_trace
from moecore.nn.routing_collection import build_record as build_record
