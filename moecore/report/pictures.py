"""Figures for a page that needs no other file: SVG that takes the page's colours, or PNG."""

import base64
import io
import re
from html import escape

import matplotlib
from matplotlib.figure import Figure

from moecore.report.drawing import INK, STYLE, laid_out


def svg(figure: Figure, label: str) -> str:
    """The figure as one <svg> element without sizes, ids of groups, metadata, outside references.

    label: the text for screen readers; it also salts the ids, so two figures of one page need two
    labels.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": label}):
        laid_out(figure).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    words = f'<svg role="img" aria-label="{escape(label, quote=True)}"'
    return text.replace("<svg", words, 1).replace(INK, "currentColor")


def png(figure: Figure) -> str:
    """The figure as a data URI; smaller than SVG for figures made of many patches."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        laid_out(figure).savefig(
            buffer, format="png", dpi=110, transparent=True, metadata={"Software": None}
        )
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
