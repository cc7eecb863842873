"""The single images of the measurement ``explorer``: explorer.html shows them, not the page."""

from moecore.measure.base import read_result
from moecore.measure.explorer import Result
from moecore.report.measures.result_display import Pictures

PICTURES = Pictures(
    "explorer",
    is_on_page=False,
    kind=Result,
    read=lambda path, stage: read_result(path, Result, stage),
)
