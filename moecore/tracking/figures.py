"""The figures of a finished run, drawn of what it wrote: stages draw nothing.

They are drawn where they are asked for, or ahead and in parallel: a finished study has a hundred,
which take longer than all else that an import does.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from moecore.core.config import Config
from moecore.core.files import FullDisk, UserError, write_whole
from moecore.run.history_file import item
from moecore.run.stage import end_with_parent
from moecore.tracking.names import TRAININGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
Figures = Iterator[tuple[str, "Figure"]]


class Kind(NamedTuple):
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


def png(figure: "Figure") -> bytes:
    """The figure as a file, drawn once: ``savefig`` would draw it a second time to lay it out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.dpi = DPI
    file = BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _samples(folder: Path) -> Figures:
    # Here, as it brings torch, which an import without new runs does not need.
    from moecore.data.prepared import Prepared
    from moecore.report.figures.contact_sheet import draw_contact_sheet

    yield "samples", draw_contact_sheet(Prepared.open(folder))


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


def _known(stage: str) -> list[Kind]:
    """The types of result that ``stage`` may have; [] where none is drawn."""
    from moecore.report.measures import SHOWN, linear_experts, sizes, transfer

    if stage == "linear_experts":
        return [Kind(linear_experts.Result, linear_experts.figures)]
    if stage == "sizes":
        return [Kind(sizes.Result, sizes.figures)]
    if stage == "transfer":
        return [Kind(transfer.Result, transfer.figures)]
    wanted = "" if stage in TRAININGS else stage
    return [Kind(shown.result, shown.figures) for shown in SHOWN if shown.stage == wanted]


MANY = 8  # runs: for fewer, processes that have to import everything do not pay


class Drawn(NamedTuple):
    """Where the pictures of one run are, and what was drawn or left out."""

    folder: Path
    said: list[str]


class Drawings:
    """Draws into a folder that goes with it; with a ``pool``, what was announced is drawn ahead."""

    def __init__(self, pool: ProcessPoolExecutor | None = None) -> None:
        self.pool = pool
        self._kept = TemporaryDirectory(prefix="moecore-")
        self.folder = Path(self._kept.name)
        self._ahead: dict[str, Future[list[str]]] = {}

    def announce(self, study: Path, header: Mapping[str, Any]) -> None:
        """The pictures of this run will be asked for."""
        uid = header["uid"]
        if self.pool is not None and uid not in self._ahead:
            self._ahead[uid] = self.pool.submit(draw, study, header, self.folder / uid)

    def of(self, study: Path, header: Mapping[str, Any]) -> Drawn:
        """The pictures of a finished run."""
        folder = self.folder / header["uid"]
        ahead = self._ahead.pop(header["uid"], None)
        if ahead is not None:
            return Drawn(folder, ahead.result())
        return Drawn(folder, draw(study, header, folder))


def draw(study: Path, header: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the pictures of one run to ``folder``; their names, and what was left out and why."""
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    try:
        for name, figure in figures(study, header):
            write_whole(folder / f"{name}.png", png(figure))
            said.append(name)
    except FullDisk:  # it is drawn the next time
        raise
    except UserError as error:  # the result is not there any more, or of other code
        said.append(f"left out: {error}")
    except Exception as error:  # a fault of one drawing; the other runs are imported
        traceback.print_exc()
        said.append(f"failed: {type(error).__name__}: {error}")
    return said


@contextmanager
def drawings(runs: int) -> Iterator[Drawings]:
    """Drawings for about so many ``runs``, in processes of their own where these are many.

    To be entered before MLflow is imported: a process with threads or connections is not to fork.
    """
    workers = min(4, len(os.sched_getaffinity(0)))
    if runs < MANY or workers == 1:
        yield Drawings()
        return
    # Imported once, for all processes.
    import moecore.report.measures  # noqa: F401

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, initializer=end_with_parent) as pool:
        pool.submit(os.getpid)  # all processes begin with the first task
        yield Drawings(pool)
