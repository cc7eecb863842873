"""The figure class of the report; importing it loads matplotlib."""

from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class StyledFigure(Figure):
    """A figure that is always drawn in one ``style``, as ticks are made and coloured only then."""

    def __init__(self, size: tuple[float, float], caption: str, raster: bool, style: Any) -> None:
        super().__init__(figsize=size)
        FigureCanvasAgg(self)
        self.style = style
        self.caption = caption
        self.raster = raster  # made of images: smaller as PNG than as SVG

    def draw(self, renderer: Any) -> None:
        with matplotlib.rc_context(self.style):
            super().draw(renderer)
