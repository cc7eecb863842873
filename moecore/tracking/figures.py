"""The figures of a finished run, drawn of what it wrote: stages draw nothing."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.run.header import item
from moecore.tracking.names import TRAININGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
Figures = Iterator[tuple[str, "Figure"]]


class Drawn(NamedTuple):
    """How one type of result is drawn."""

    result: type[Config]
    figures: Callable[[Any], Figures]


def figures(study: Path, header: Mapping[str, Any]) -> Figures:
    """Names and figures of the run that ``header`` begins, in the folder of a study.

    Raises UserError where what it wrote is missing or was written by other code.
    """
    stage = header["stage"]
    if stage == "prepare":
        return _samples(study / "artifacts/data" / header["phase"])
    path = item(stage, header["phase"], header["method"], header["seed"])
    return _of_result(study / "artifacts/measured" / f"{path}.json", stage)


def write_png(figure: "Figure", path: Path) -> None:
    """The figure as a file, drawn once: ``savefig`` would draw it a second time to lay it out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.dpi = DPI
    FigureCanvasAgg(figure).print_png(path)


def _samples(folder: Path) -> Figures:
    # Here, as it brings torch, which an import without new runs does not need.
    from moecore.data.contact import contact_sheet
    from moecore.data.prepared import Prepared

    yield "samples", contact_sheet(Prepared.open(folder))


def _of_result(path: Path, stage: str) -> Figures:
    from moecore.measure.base import Skipped, read_result

    known = _known(stage)
    for number, drawn in enumerate(known, 1):
        try:
            result = read_result(path, drawn.result, stage)
        except UserError:
            # `calibrate` writes one of two types, by the task; the last one's error is told.
            if number < len(known):
                continue
            raise
        if not isinstance(result, Skipped):
            yield from drawn.figures(result)
        return


def _known(stage: str) -> list[Drawn]:
    """The types of result that ``stage`` may have; [] where none is drawn."""
    from moecore.report.measures import SHOWN, linear_experts, transfer

    if stage == "linear_experts":
        return [Drawn(linear_experts.Result, linear_experts.figures)]
    if stage == "transfer":
        return [Drawn(transfer.Result, transfer.figures)]
    wanted = "" if stage in TRAININGS else stage
    return [Drawn(shown.result, shown.figures) for shown in SHOWN if shown.stage == wanted]
