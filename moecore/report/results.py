"""Reads what the stages wrote, from the files that the settings name.

Never by a glob: removed methods leave files behind.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from moecore.core.config import Config
from moecore.core.files import UserError, read_json
from moecore.core.sources import list_pipeline_files
from moecore.data.preview import read_task
from moecore.measure.base import Skipped, read_result
from moecore.measure.linear_experts import Result as LinearExperts
from moecore.measure.sizes import Result as Sizes
from moecore.measure.transfer import Result as Transfer
from moecore.report.measured import Measured, Phase, Results
from moecore.report.measures import SHOWN
from moecore.report.measures.shown import Shown
from moecore.study.reading.run_section import Phase as PhaseName
from moecore.study.reading.run_section import Selection
from moecore.tasks.base import Task

USUAL = ("calibrate", "robustness", "routing")
MEASURED = Path("artifacts/measured")
ALONE: dict[str, type[Config]] = {"linear_experts": LinearExperts, "sizes": Sizes}  # by stage


class Place(NamedTuple):
    """Where results of one study lie."""

    root: Path
    run: Selection
    stages: frozenset[str]  # that the study has


def study_stages(params: str | Path, run: Selection) -> frozenset[str]:
    """What the dvc.yaml beside ``params`` measures; the usual three where there is no dvc.yaml."""
    files = list_pipeline_files(Path(params).parent)
    if not files:
        return frozenset(USUAL)
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    stages = set(re.findall(r"-m stages\.(\w+)", text))
    stages |= set(re.findall(r"-m stages\.measure (\w+)", text))
    if re.search(r"-m stages\.measure \$", text):
        stages |= set(run.measurements)
    return frozenset(stages)


def read_results(
    run: Selection, settings: str, root: str | Path = ".", stages: Collection[str] = USUAL
) -> Results:
    """Every file that ``run`` asks for, below ``root``.

    settings: the text of params.yaml; stages: what the study measures.

    Raises UserError that names a missing or damaged file, or one that other code wrote.
    """
    place = Place(Path(root), run, frozenset(stages))
    alone: dict[type[Config], Config] = {}
    for stage, kind in ALONE.items():
        if stage in stages:
            path = place.root / MEASURED / f"{stage}.json"
            alone[kind] = read_result(require_file(path, stage), kind, stage)
    return Results({phase: _phase(place, phase) for phase in run.phases}, settings, alone)


def _phase(place: Place, name: PhaseName) -> Phase:
    card, task = read_card(place.root, name)
    wanted = [shown for shown in SHOWN if _wanted(shown, place, name, task)]
    models = {
        method: {
            seed: _model(place, name, f"{method}/{seed}.json", wanted) for seed in place.run.seeds
        }
        for method in place.run.methods
    }
    together: dict[type[Config], Config] = {}
    if "transfer" in place.stages:
        path = place.root / MEASURED / "transfer" / name / f"{place.run.seeds[0]}.json"
        matrix = read_result(require_file(path, "transfer"), Transfer, "transfer")
        if not isinstance(matrix, Skipped):
            together[Transfer] = matrix
    return Phase(name, card, task, models, together)


def read_card(root: Path, phase: str) -> tuple[dict[str, Any], Task]:
    """Return the card of a phase's data, and its task.

    Raises UserError where it is missing or damaged, or where other code wrote it.
    """
    path = require_file(root / "artifacts/data" / phase / "card.json", "prepare")
    card = read_json(path)
    try:
        return card, read_task(card["task"])
    except (KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        again = "run `dvc repro prepare`"
        raise UserError(
            f"{path}: was written by an older version of moecore ({reason}); {again}"
        ) from None


def _wanted(shown: Shown, place: Place, phase: PhaseName, task: Task) -> bool:
    """Whether the study measures this on the models of a phase."""
    if not shown.applies(task):
        return False
    if not shown.stage:
        return True
    return shown.stage in place.stages and place.run.covers(shown.stage, phase)


def _model(place: Place, phase: str, name: str, wanted: Collection[Shown]) -> Measured:
    results: dict[type[Config], Config] = {}
    skipped = []
    for shown in wanted:
        path = place.root / MEASURED / shown.stage / phase / name
        stage = "measure" if shown.stage in place.run.measurements else shown.stage or phase
        result = read_result(require_file(path, stage), shown.result, stage)
        if isinstance(result, Skipped):
            skipped.append(f"{shown.title}: {result.skipped}")
        else:
            results[shown.result] = result
    return Measured(results, tuple(skipped))


def require_file(path: Path, stage: str) -> Path:
    """The path itself.

    Raises UserError where there is no such file, which names the stage that writes it.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; `dvc repro {stage}` writes it")
    return path
