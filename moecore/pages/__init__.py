"""What a page module of one's own measurement is written with: its columns, and what it shows."""

from moecore.report.column import Column as Column
from moecore.report.measures.result_display import Shown as Shown
