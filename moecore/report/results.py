"""What the stages measured, read from the files that the settings name (never by a glob: removed methods leave files behind)."""

import re
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moecore.data.prepared import is_real
from moecore.files import StageError, read_json
from moecore.selection import Selection
from moecore.yaml12 import parse

TRAINED = (
    "test_accuracy", "test_correct", "test_count", "test_loss", "images_per_second", "seconds", "parameters", "active_parameters",
    "curve", "confusion", "classes",
)  # fmt: skip
TRAINED_AGES = ("test_mae", "images_per_second", "seconds", "parameters", "active_parameters", "curve")
MEASURED = {
    "calibrate": ("temperature", "at_limit", "before", "after", "hits"),
    "robustness": ("images", "clean_accuracy", "attacks", "worst_case", "audit"),
    "routing": ("images", "layers", "overlays"),
    "invariance": ("transforms",),
    "corruptions": ("images", "clean_error", "mean_error", "corruptions"),
    "lipschitz": ("images", "local_mean"),
    "cost": ("flops_per_image", "latency_ms", "peak_memory_bytes", "routing_ms", "routing_share"),
    "stability": ("images", "noise"),
    "cohort_checks": ("isolated", "order", "ageing", "rescan"),
}
MEASURED_AGES = MEASURED | {  # where the answer is a real number
    "calibrate": ("task", "raw", "pooled", "sex_specific", "median_mae", "age_range", "interval", "points"),
    "robustness": ("images", "clean_mae", "attacks", "worst_case", "audit"),
}
USUAL = ("calibrate", "robustness", "routing")
NOTHING: dict[str, Any] = MappingProxyType({})


class Measured(NamedTuple):
    """Everything known of one model: what its training wrote, and each measuring stage; empty for a stage that the study lacks."""

    trained: dict[str, Any]
    calibrate: dict[str, Any] = NOTHING
    robustness: dict[str, Any] = NOTHING
    routing: dict[str, Any] = NOTHING
    invariance: dict[str, Any] = NOTHING
    corruptions: dict[str, Any] = NOTHING
    lipschitz: dict[str, Any] = NOTHING
    cost: dict[str, Any] = NOTHING
    stability: dict[str, Any] = NOTHING
    cohort_checks: dict[str, Any] = NOTHING


class Results(NamedTuple):
    """``models[phase][method][seed]``, the data cards by phase, and the text of params.yaml."""

    models: dict[str, dict[str, dict[int, Measured]]]
    cards: dict[str, dict[str, Any]]
    settings: str

    @property
    def simulated(self) -> list[str]:
        """Names of the data sets that are simulated."""
        return [card["name"] for card in self.cards.values() if card.get("simulated")]

    @property
    def controls(self) -> frozenset[str]:
        """Names of the null controls: methods with ``permuted: true``, whose training labels are dealt out anew, so that they can learn nothing."""
        methods = (parse(self.settings).data or {}).get("methods") or {}
        return frozenset(name for name, settings in methods.items() if (settings or {}).get("permuted"))


def study_stages(params: str | Path) -> frozenset[str]:
    """The measuring stages that the dvc.yaml beside ``params`` runs; the usual three where there is no dvc.yaml."""
    pipeline = Path(params).with_name("dvc.yaml")
    if not pipeline.exists():
        return frozenset(USUAL)
    return frozenset(re.findall(r"-m stages\.(\w+)", pipeline.read_text(encoding="utf-8"))) & MEASURED.keys()


def read_results(run: Selection, settings: str, root: str | Path = ".", stages: Collection[str] = USUAL) -> Results:
    """Read every file that ``run`` asks for, below ``root``; ``stages``: the measuring stages that the study has.

    Raises StageError that names a missing or damaged file, or a key that it lacks.
    """
    root = Path(root)
    there = {phase: [stage for stage in stages if run.covers(stage, phase)] for phase in run.phases}
    cards = {phase: read_json(root / "artifacts/data" / phase / "card.json") for phase in run.phases}
    models = {
        phase: {
            method: {seed: _measured(root, Path(phase) / method / f"{seed}.json", there[phase], is_real(cards[phase])) for seed in run.seeds}
            for method in run.methods
        }
        for phase in run.phases
    }
    return Results(models, cards, settings)


def _measured(root: Path, where: Path, stages: Collection[str], real: bool) -> Measured:
    folder, wanted = root / "artifacts/measured", MEASURED_AGES if real else MEASURED
    found = {stage: _with(folder / stage / where, keys) for stage, keys in wanted.items() if stage in stages}
    return Measured(_with(folder / where, TRAINED_AGES if real else TRAINED), **found)


def _with(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    found = read_json(path)
    if lacking := [key for key in keys if key not in found]:
        raise StageError(f"{path}: lacks {', '.join(lacking)}; run the stage that writes it again")
    return found
