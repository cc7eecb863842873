"""Reads what the stages wrote, from the files that the settings name.

Never by a glob: removed methods leave files behind.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moecore.core.config import Config
from moecore.core.files import UserError, read_json
from moecore.data.card import parse_card_task
from moecore.measure.base import Skipped, read_result
from moecore.measure.linear_experts import LinearExperts
from moecore.measure.sizes import Sizes
from moecore.measure.transfer import Transfer
from moecore.measure.values import Found
from moecore.report.measures.result_display import Display, list_displays
from moecore.report.typed_results import Measured, Phase, Results, stages_and_measurements
from moecore.study.sections import Phase as PhaseName
from moecore.study.sections import Selection
from moecore.study.stages import MEASURE, MEASURED_STAGES
from moecore.tasks.base import Task

MEASURED = Path("artifacts/measured")
ALONE: dict[str, type[Config]] = {"linear_experts": LinearExperts, "sizes": Sizes}  # by stage


def read_results(
    run: Selection, settings: str, root: str | Path = ".", stages: Collection[str] = MEASURED_STAGES
) -> Results:
    """Every file that ``run`` asks for, below ``root``.

    settings: the text of params.yaml; stages: of the study's dvc.yaml.

    Raises UserError that names a missing or damaged file, or one that other code wrote.
    """
    measured = stages_and_measurements(stages, run)
    alone = {
        kind: read_result(Path(root, MEASURED, f"{stage}.json"), Found, stage)
        for stage, kind in ALONE.items()
        if stage in measured
    }
    phases: dict[str, Phase] = {
        name: _read_phase(Path(root), run, measured, name) for name in run.phases
    }
    return Results(phases, settings, alone)


def _read_phase(root: Path, run: Selection, stages: Collection[str], name: PhaseName) -> Phase:
    card, task = read_card_and_task(root, name)
    wanted = [
        shown
        for shown in list_displays()
        if shown.applies(task)
        and (not shown.stage or (shown.stage in stages and run.covers(shown.stage, name)))
    ]
    models = {
        method: {
            seed: read_model(root, name, f"{method}/{seed}", wanted, run.measurements)
            for seed in run.seeds
        }
        for method in run.methods
    }
    together: dict[type[Config], Config] = {}
    if "transfer" in stages:
        path = root / MEASURED / "transfer" / name / f"{run.seeds[0]}.json"
        matrix = read_result(path, Found, "transfer")
        if not isinstance(matrix, Skipped):
            together[Transfer] = matrix
    return Phase(name, card, task, models, together)


def read_card_and_task(root: Path, phase: str) -> tuple[dict[str, Any], Task]:
    """Return the card and task of a phase's data; UserError where missing or damaged."""
    path = root / "artifacts/data" / phase / "card.json"
    card = read_json(path)
    try:
        return card, parse_card_task(card["task"])
    except (KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        again = "run `dvc repro prepare`"
        raise UserError(
            f"{path}: was written by an older version of moecore ({reason}); {again}"
        ) from None


def read_model(
    root: Path,
    phase: str,
    model: str,
    wanted: Iterable[Display],
    measurements: Collection[str] = (),
) -> Measured:
    """Return what was measured of a model, ``vmoe/0``.

    measurements: those that the stage ``measure`` writes. Raises UserError as ``read_result`` does.
    """
    results: dict[type[Config], Config] = {}
    skipped = []
    for shown in wanted:
        path = root / MEASURED / shown.stage / phase / f"{model}.json"
        stage = shown.stage or phase
        if stage in measurements:
            stage = MEASURE
        result = shown.read(path, stage)
        if isinstance(result, Skipped):
            skipped.append(f"{shown.title}: {result.skipped}")
        elif result is not None:
            results[shown.kind] = result
    return Measured(results, tuple(skipped))
