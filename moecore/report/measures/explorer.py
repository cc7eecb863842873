"""The single images of the measurement ``explorer``: explorer.html shows them, not the page."""

from moecore.measure.explorer import Result
from moecore.report.measures.result_display import Shown

SHOWN = Shown("explorer", "single images", Result, place=15)
