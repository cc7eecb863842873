"""What every page is made of: the templates, and figures that need no other file.

A figure is an SVG that takes the page's colours, or a PNG.
"""

import base64
import io
import re
from functools import cache
from html import escape

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from moecore.report.figures.drawing import INK, STYLE, finish_layout
from moecore.report.page.view import Picture


@cache
def template_environment() -> Environment:
    """The templates, which escape all text."""
    environment = Environment(
        loader=PackageLoader("moecore.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawn"] = render_picture
    return environment


def render_picture(picture: Picture) -> Markup | str:
    """Markup of an SVG, or the address of a PNG."""
    if picture.raster:
        return png(picture.figure)
    return Markup(svg(picture.figure, picture.label))


def svg(figure: Figure, label: str) -> str:
    """The figure as one <svg> element without sizes, ids of groups, metadata, outside references.

    label: the text for screen readers; it also salts the ids, so two figures of one page need two
    labels.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": label}):
        FigureCanvasSVG(finish_layout(figure)).print_svg(buffer, metadata={"Date": None})
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
        finish_layout(figure).set_dpi(110)
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
