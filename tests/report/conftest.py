"""Pages whose words alone are looked at have empty figures: to draw fifty takes five seconds."""

from html import escape

import pytest

from moecore.report.page import templating


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures are elements without content."""
    monkeypatch.setattr(
        templating, "svg", lambda figure, label: f'<svg aria-label="{escape(label)}"></svg>'
    )
    monkeypatch.setattr(templating, "png", lambda figure: "data:,")
