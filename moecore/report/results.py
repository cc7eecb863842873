"""The results of every method and seed, read from disk by name (never by a glob: removed methods leave files behind)."""

from pathlib import Path
from typing import Any, NamedTuple

from moecore.files import StageError, read_json
from moecore.selection import Selection

TRAINED = (
    "test_accuracy", "test_correct", "test_count", "test_loss", "images_per_second", "seconds", "parameters", "active_parameters",
    "curve", "confusion", "classes",
)  # fmt: skip
MEASURED = {
    "calibrate": ("temperature", "at_limit", "before", "after"),
    "robustness": ("images", "clean_accuracy", "attacks"),
    "routing": ("images", "layers", "overlays"),
}
FILE = {"trained": "{phase}", "calibrate": "calibrate/{phase}", "robustness": "robustness/{phase}", "routing": "routing/{phase}"}


class Measured(NamedTuple):
    """Everything known of one model: what its training wrote and what the three measuring stages wrote."""

    trained: dict[str, Any]
    calibrate: dict[str, Any]
    robustness: dict[str, Any]
    routing: dict[str, Any]


class Results(NamedTuple):
    """``models[phase][method][seed]``, the data cards by phase, and the text of params.yaml."""

    models: dict[str, dict[str, dict[int, Measured]]]
    cards: dict[str, dict[str, Any]]
    settings: str


def read_results(run: Selection, settings: str, root: str | Path = ".") -> Results:
    """Read every file that ``run`` asks for, below ``root``.

    Raises StageError that names a missing or damaged file, or a key that it lacks.
    """
    root = Path(root)
    models = {phase: {method: {seed: _measured(root, phase, method, seed) for seed in run.seeds} for method in run.methods} for phase in run.phases}
    return Results(models, {phase: read_json(root / "artifacts/data" / phase / "card.json") for phase in run.phases}, settings)


def _measured(root: Path, phase: str, method: str, seed: int) -> Measured:
    paths = {name: root / "artifacts/measured" / FILE[name].format(phase=phase) / method / f"{seed}.json" for name in Measured._fields}
    return Measured(**{name: _with(path, MEASURED.get(name, TRAINED)) for name, path in paths.items()})


def _with(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    found = read_json(path)
    if lacking := [key for key in keys if key not in found]:
        raise StageError(f"{path}: lacks {', '.join(lacking)}; run the stage that writes it again")
    return found
