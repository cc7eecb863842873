"""Pages whose words alone are looked at have empty figures: to make fifty takes eight seconds."""

from html import escape

import pytest

from moecore.report.figures import drawing
from moecore.report.figures.drawing import create_figure
from moecore.report.page import report_page


@pytest.fixture
def drawn() -> None:
    """Asked for by a test of a file that is ``undrawn``: its own figures are drawn."""


@pytest.fixture
def undrawn(monkeypatch, request) -> None:
    """Figures are empty, and elements without content."""
    if "drawn" in request.fixturenames:
        return
    empty = create_figure(1, 1)
    monkeypatch.setattr(drawing, "draw_in_style", lambda draw, *args, **kwargs: empty)
    labelled = lambda figure, label: f'<svg aria-label="{escape(label)}"></svg>'
    monkeypatch.setattr(report_page, "render_svg", labelled)
    monkeypatch.setattr(report_page, "render_png_data_uri", lambda figure: "data:,")
