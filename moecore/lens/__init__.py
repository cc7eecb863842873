"""Traces: routing records in files, of any model, and what they say (``moecore lens``)."""

from moecore.lens.analyses import analyse_trace as analyse_trace
from moecore.lens.trace_reader import LayerRouting as LayerRouting
from moecore.lens.trace_reader import Trace as Trace
from moecore.lens.trace_writer import TraceWriter as TraceWriter
from moecore.lens.trace_writer import write_trace as write_trace
from moecore.nn.router_hooks import build_record as build_record
