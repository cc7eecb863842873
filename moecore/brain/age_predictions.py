"""Write predictions.csv with flags of unusual volumes, and predict training ages out of fold."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from moecore.core.arrays_as_text import escape_spreadsheet_formula
from moecore.core.config import Config
from moecore.core.files import UserError, atomic_folder, write_csv
from moecore.data.prepared import Prepared
from moecore.measure.calibrators.base import FittedCalibrator
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Estimate
from moecore.training import artifacts, loop, settings, single_tissue_volumes
from moecore.training.job import Objective, TrainingJob, build_training_job
from moecore.training.method import Method
from moecore.training.runtime import Runtime


class TrainingRange(Config):
    low: float
    high: float


class GridAndAgeRange(Config):
    """Facts of the data card that are needed to prepare new volumes and to compare them."""

    size: tuple[int, ...]
    voxel_mm: tuple[float, ...]
    target_range: tuple[float, float]


class ConformalInterval(Config):
    level: float
    radius: float | None = Field(description="half its width, years; null: too few participants")
    n: int = Field(description="validation participants that it was computed from")
    coverage: Estimate | None = Field(description="share of the test volumes inside")
    method: str


class TrainingCohortRanges(Config):
    """Content of reference.json: ranges of the training volumes, to which new ones are compared."""

    ranges: dict[str, TrainingRange] = Field(description="per quantity, over the training volumes")
    sites: tuple[str, ...]
    data: GridAndAgeRange
    interval: ConformalInterval
    predictor_sha256: str


def measure_size_and_brightness(volume: np.ndarray, voxel_mm: Sequence[float]) -> dict[str, float]:
    """Return brain size in mL, and mean and SD of brain intensity, of a volume (1, D, H, W)."""
    inside = volume[volume > 0].astype(np.float64)
    return {
        "intensity_mean": float(inside.mean()),
        "intensity_std": float(inside.std()),
        "brain_ml": inside.size * float(np.prod(voxel_mm)) / 1000,
    }


def collect_training_ranges(
    data: Prepared, interval: ConformalInterval, sha256: str
) -> TrainingCohortRanges:
    """Return the content of reference.json from the training split; sha256: of the weights."""
    facts = GridAndAgeRange(**{name: data.card[name] for name in GridAndAgeRange.model_fields})
    rows = [measure_size_and_brightness(volume, facts.voxel_mm) for volume in data.train.images]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    ranges = {key: TrainingRange(low=min(row), high=max(row)) for key, row in columns.items()}
    sites = sorted({row["site"] for row in data.subjects("train")} - {""})
    return TrainingCohortRanges(
        ranges=ranges, sites=sites, data=facts, interval=interval, predictor_sha256=sha256
    )


def flag_volume(
    volume: np.ndarray,
    predicted: float,
    age: float | None,
    reference: TrainingCohortRanges,
    site: str = "",
) -> list[str]:
    """Return a warning for each quantity, age or site that lies outside the training range."""
    quantities = measure_size_and_brightness(volume, reference.data.voxel_mm)
    flags = [
        f"{name} {quantities[name]:.4g} outside training {limits.low:.4g} to {limits.high:.4g}"
        for name, limits in reference.ranges.items()
        if not limits.low <= quantities[name] <= limits.high
    ]
    low, high = reference.data.target_range
    for name, value in (("predicted age", predicted), ("age", age)):
        if value is not None and not low <= value <= high:
            flags.append(f"{name} {value:.1f} outside training {low:.1f} to {high:.1f}")
    if site and site not in reference.sites:
        flags.append(f"site {site} not in training")
    return flags


NO_CALIBRATION_GROUP = "none"  # calibration group of an uncorrected prediction


class PredictionRow(NamedTuple):
    """One row of predictions.csv: a volume, its ages in years, interval and flags."""

    participant_id: str
    session_id: str
    split: str
    sex: str
    site: str
    age: float | None
    predicted_age: float
    predicted_age_pooled: float | None
    predicted_age_sex_specific: float | None
    brain_pad_raw: float | None  # predicted minus known age
    brain_pad_pooled: float | None
    interval_low: float | None
    interval_high: float | None
    calibration_group: str  # the sex whose line corrected it, or pooled
    qc_flags: str


COLUMNS = PredictionRow._fields


class CorrectedAges(NamedTuple):
    """Predicted ages (N,) in years: raw, and corrected, which is None without a calibrator."""

    raw: np.ndarray
    pooled: np.ndarray | None
    sex_specific: np.ndarray | None
    groups: list[str] | None  # the calibration group of each volume
    uses_age: bool = False  # the correction used the age; values are NaN where it is unknown

    @property
    def best(self) -> np.ndarray:
        """Centres of intervals (N,): ``pooled``; ``raw`` if that is None or needs the known age."""
        # A correction that uses the known age is not a prediction.
        if self.pooled is None or self.uses_age:
            return self.raw
        return self.pooled

    @property
    def variants(self) -> dict[str, np.ndarray]:
        named = {"raw": self.raw, "pooled": self.pooled, "sex_specific": self.sex_specific}
        return {name: values for name, values in named.items() if values is not None}


def correct_ages(
    raw: np.ndarray,
    sexes: Sequence[str],
    fitted: FittedCalibrator | None,
    ages: np.ndarray | None = None,
) -> CorrectedAges:
    """Correct predictions ``raw`` (N,) by the calibrator ``fitted``; None: no correction."""
    # ages: (N,), known ages for a calibrator that uses them; NaN: unknown.
    raw = np.asarray(raw, np.float64)
    if fitted is None:
        return CorrectedAges(raw, None, None, None)
    if not fitted.uses_age:
        return CorrectedAges(raw, fitted.apply(raw), fitted.apply(raw, sexes), fitted.used(sexes))
    ages = np.full(len(raw), np.nan) if ages is None else np.asarray(ages, np.float64)
    has_age = np.isfinite(ages)
    sexes_of_aged = [sex for sex, aged in zip(sexes, has_age, strict=True) if aged]
    pooled, sex_specific = np.full((2, len(raw)), np.nan)
    by_age: Any = fitted
    pooled[has_age] = by_age.apply(raw[has_age], None, ages[has_age])
    sex_specific[has_age] = by_age.apply(raw[has_age], sexes_of_aged, ages[has_age])
    pairs = zip(fitted.used(sexes), has_age, strict=True)
    groups = [group if aged else NO_CALIBRATION_GROUP for group, aged in pairs]
    return CorrectedAges(raw, pooled, sex_specific, groups, uses_age=True)


def prediction_rows(
    subjects: Sequence[Mapping[str, str]],  # rows of the prepared data's subjects table
    split: str,
    corrected: CorrectedAges,
    radius: float | None,  # half the interval's width in years
    flags: Sequence[Sequence[str]],  # (N,) additional flags of each volume
) -> list[PredictionRow]:
    """Return one row of predictions.csv per subject; brain_pad is None for an unknown age."""
    rows = []
    empty = [None] * len(subjects)
    for subject, raw, pooled, sex_specific, group, centre, added in zip(
        subjects,
        corrected.raw.tolist(),
        empty if corrected.pooled is None else corrected.pooled.tolist(),
        empty if corrected.sex_specific is None else corrected.sex_specific.tolist(),
        corrected.groups or [NO_CALIBRATION_GROUP] * len(subjects),
        corrected.best.tolist(),
        flags,
        strict=True,
    ):
        age = float(subject["age"]) if subject["age"] else None
        if corrected.uses_age and age is None:
            pooled = sex_specific = None
            added = (*added, "not corrected: the correction uses the age, which is unknown")
        rows.append(
            PredictionRow(
                **{name: subject[name] for name in ("participant_id", "session_id", "sex", "site")},
                split=split,
                age=age,
                predicted_age=raw,
                predicted_age_pooled=pooled,
                predicted_age_sex_specific=sex_specific,
                brain_pad_raw=_subtract_unless_none(raw, age),
                brain_pad_pooled=_subtract_unless_none(pooled, age),
                interval_low=_subtract_unless_none(centre, radius),
                interval_high=None if radius is None else centre + radius,
                calibration_group=group,
                qc_flags="; ".join(flag for flag in (subject.get("qc_flags", ""), *added) if flag),
            )
        )
    return rows


def write_predictions(
    path: str | Path,
    rows: Iterable[PredictionRow],
    left_out: Sequence[tuple[Mapping[str, str], str]] | None = None,
) -> None:
    lines = [
        [f"{value:.4f}" if isinstance(value, float) else str(value or "") for value in row]
        for row in rows
    ]
    columns = [*COLUMNS]
    # left_out: rows of subjects without a prediction, each with the reason
    if left_out is not None:
        columns.append("error")
        lines = [[*line, ""] for line in lines]
        lines += [[*(subject.get(name, "") for name in COLUMNS), why] for subject, why in left_out]
        lines = [[escape_spreadsheet_formula(cell) for cell in line] for line in lines]
    write_csv(path, [columns, *lines])


def read_predictions(path: str | Path) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            return list(csv.DictReader(handle))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the stage that writes it has not run") from None


def _subtract_unless_none(value: float | None, other: float | None) -> float | None:
    if value is None or other is None:
        return None
    return value - other


BATCH = 8  # volumes per forward pass
# Runs the training of a fold: called with the fold, its number of steps, and the metrics iterator.
Follow = Callable[[int, int, Iterator[loop.Metrics]], None]
Log = Callable[[int, dict[str, float]], None]  # receives a step, and name → value


class OutOfFoldSettings(Config):
    """Settings of out-of-fold predictions."""

    folds: int = Field(5, ge=2, description="Number of models, each without a part of the people.")


class FoldRecipe(NamedTuple):
    """What each fold's model is trained with: the settings of the stage ``pretrain``."""

    backbone: Backbone
    training: settings.Training
    method: Method
    folds: int
    seed: int


class OutOfFoldMae(Config):
    """Error of the out-of-fold predictions of all training volumes."""

    mae: float  # years


def train_folds_and_write_ages(
    recipe: FoldRecipe,
    data: Prepared,
    runtime: Runtime,
    work: Path,  # checkpoints, from which a killed process continues
    out: Path,  # the written folder
    follow: Follow,  # runs the training of a fold
    log: Log,  # receives the MAE of each fold
    inputs: artifacts.TrainingEditGuardProtocol | None = None,
) -> OutOfFoldMae:
    """Train one model per fold on the other folds, predict its volumes, write predictions.csv."""
    if recipe.method.guided or recipe.method.upcycle:
        raise UserError(
            "out_of_fold: the method learns from a teacher that saw all training volumes; allowed: "
            "methods without a teacher"
        )
    subjects = data.subjects("train")
    ages = data.train.labels
    people = [subject["participant_id"] for subject in subjects]
    fold = assign_folds(people, ages, recipe.folds, recipe.seed)
    predicted = np.full(len(fold), np.nan)
    for number in range(recipe.folds):
        job = build_fold_job(recipe, data, np.flatnonzero(fold != number), runtime)
        home = work / f"fold_{number}"
        home.mkdir(exist_ok=True)
        checkpoint = artifacts.Checkpoint(home, inputs)
        learning = loop.iterate_training(job, recipe.training, recipe.seed, runtime, checkpoint)
        follow(number, loop.total_steps(job, recipe.training), learning)
        held_out = np.flatnonzero(fold == number)
        volumes = data.train.images[held_out]
        answers, _ = predict_in_batches(job.model, volumes, BATCH, routing=False)
        predicted[held_out] = answers[:, 0].double().numpy()
        log(number, {"mae": float(np.abs(predicted[held_out] - ages[held_out]).mean())})
    flags = [[f"fold {number}"] for number in fold]
    rows = prediction_rows(subjects, "train", correct_ages(predicted, [], None), None, flags)
    with atomic_folder(out) as folder:
        write_predictions(folder / "predictions.csv", rows)
    return OutOfFoldMae(mae=float(np.abs(predicted - ages).mean()))


def build_fold_job(
    recipe: FoldRecipe, data: Prepared, rows: np.ndarray, runtime: Runtime
) -> TrainingJob:
    """Return a fold's training job; rows: indices of the training volumes that it learns from."""
    method = recipe.method
    torch.manual_seed(recipe.seed)
    image = ImageSpec.from_card(data.card)
    model = method.merge_model_settings(recipe.backbone).build(image, method.moe)
    return build_training_job(
        model,
        data,
        Objective(method.losses, recipe.training.label_smoothing, method.distillation),
        runtime.device,
        subset=rows,
        views=method.views,
        isolation=single_tissue_volumes.build_tissue_isolation(method, data, rows),
        permuted=recipe.seed if method.permuted else None,
    )


def assign_folds(people: Sequence[str], ages: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Return the fold that holds out each volume, int64 (N,), the same for all of a person."""
    # Participants are sorted by mean age; each ``folds`` neighbours are shuffled over the folds.
    names, person = np.unique(np.array(people, dtype=str), return_inverse=True)
    if len(names) < folds:
        allowed = f"at most {len(names)}, the participants of the training split"
        raise UserError.at("out_of_fold.folds", found=folds, allowed=allowed)
    means = np.bincount(person, weights=np.asarray(ages, np.float64)) / np.bincount(person)
    generator = np.random.default_rng(seed)
    fold = np.empty(len(names), np.int64)
    order = np.argsort(means, kind="stable")
    for start in range(0, len(order), folds):
        group = order[start : start + folds]
        fold[group] = generator.permutation(folds)[: len(group)]
    return fold[person]
