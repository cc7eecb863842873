"""The class of the report's figures; importing this module loads matplotlib."""

from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class StyledFigure(Figure):
    """A figure that applies ``style`` whenever it is drawn, because ticks are created only then."""

    def __init__(self, size: tuple[float, float], caption: str, raster: bool, style: Any) -> None:
        super().__init__(figsize=size)
        FigureCanvasAgg(self)
        self.style = style
        self.caption = caption
        self.raster = raster  # made of images: smaller as PNG than as SVG

    def draw(self, renderer: Any) -> None:
        with matplotlib.rc_context(self.style):
            super().draw(renderer)
