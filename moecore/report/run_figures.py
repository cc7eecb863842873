"""The figures of one run, drawn of what it wrote: stages draw nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure.base import Skipped, read_result
from moecore.report.figures.contact_sheet import draw_contact_sheet
from moecore.report.measures import SHOWN, linear_experts, sizes, transfer

ALONE: dict[str, Any] = {"linear_experts": linear_experts, "sizes": sizes, "transfer": transfer}
TRAININGS = ("teacher", "pretrain", "finetune", "adversarial")


def draw_run_figures(study: Path, stage: str, item: str) -> Iterator[tuple[str, Figure]]:
    """Yield names and figures of a run, in the folder of a study.

    item: its path in artifacts/history. Raises UserError where what it wrote is missing or was
    written by an older version.
    """
    if stage == "prepare":
        folder = study / "artifacts/data" / item.removeprefix("prepare/")
        yield "samples", draw_contact_sheet(Prepared.open(folder))
        return
    wanted = "" if stage in TRAININGS else stage
    kinds = [(one.result, one.figures) for one in SHOWN if one.stage == wanted]
    if stage in ALONE:
        kinds = [(ALONE[stage].Result, ALONE[stage].figures)]
    path = study / "artifacts/measured" / f"{item}.json"
    for number, (kind, figures) in enumerate(kinds, 1):
        try:
            result = read_result(path, kind, stage)
        except UserError:
            # `calibrate` writes one of two types, by the task; the last one's error is told.
            if number < len(kinds):
                continue
            raise
        if not isinstance(result, Skipped):
            yield from figures(result)
        return
