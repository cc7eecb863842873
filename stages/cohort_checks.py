"""What a model of age looks at: volumes with one tissue left, the same simulated subject aged, and the same subject scanned again.

    python -m stages.cohort_checks <phase> <method> <seed>

Ageing needs subjects of whom all but age stays as it is, which only a simulation (kind: phantom) has.
"""

import importlib
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.data import Source
from moecore.data.prepared import SPLITS, Prepared, spread
from moecore.data.workers import each
from moecore.evaluation.cohort import ageing, mean_interval, repeated
from moecore.evaluation.intervals import bootstrap_mean
from moecore.evaluation.linear_probe import linear_probe, read_by_head
from moecore.evaluation.predict import predictions
from moecore.evaluation.regions import isolate
from moecore.evaluation.regression import median_mae
from moecore.files import StageError
from moecore.history import Run
from moecore.kept import Kept, resumable
from moecore.params import Key, read
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune

PEOPLE = 1000  # people set aside for each value of `seed`; those who are scanned again begin at half of them
SIMULATED_ONLY = "only a simulated cohort (kind: phantom) can age a subject and leave all else as it is"
ORDER = ("csf", "gm", "wm")
NAMES = {"value": "mae", "low": "low", "high": "high"}
Age = Annotated[float, Field(gt=0, le=120)]


class CohortChecks(Config):
    """How many simulated subjects are aged and scanned again."""

    subjects: int = Field(8, ge=1, le=PEOPLE // 2, description="Simulated subjects that are aged; half of them women. None of them is in the cohort.")
    ages: tuple[Age, ...] = Field((20, 30, 40, 50, 60, 70, 80, 90), min_length=2, description="The ages of each, rising.")
    rescans: int = Field(16, ge=1, le=PEOPLE // 2, description="Simulated subjects, of ages spread over `ages`, that are scanned again at their own and at another site.")
    years: float = Field(1.0, gt=0, description="Real cohorts: two sessions of a participant within this time count as a rescan.")
    probe: int = Field(256, ge=2, description="Training volumes, at most, on which the linear probe of a tissue is fitted.")
    batch: int = Field(16, ge=1, description="Volumes a forward pass; no result depends on it.")
    seed: int = Field(0, ge=0, le=400, description="Draws the simulated subjects, the same for every model.")
    resamples: int = Field(1000, ge=100, description="Bootstrap resamples behind every interval.")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if list(self.ages) != sorted(set(self.ages)):
            raise ValueError(f"ages: found {list(self.ages)}; allowed: rising ages, each once")
        return self


class Params(Config):
    cohort_checks: CohortChecks
    source: Annotated[Source, Key("data.{phase}")]


def answers(model: nn.Module, volumes: np.ndarray | Tensor, batch: int) -> np.ndarray:
    """Predicted ages (N,) fp64 of volumes (N, 1, D, H, W)."""
    return predictions(model, volumes, batch, routing=False)[0][:, 0].double().numpy()


class Seen(NamedTuple):
    """What a model says of a split's volumes: predicted ages (N,), what its head read (N, F), and the true ages (N,)."""

    predicted: np.ndarray
    features: np.ndarray
    ages: np.ndarray


def seen(model: nn.Module, data: Prepared, split: str, region: int | None, batch: int, count: int | None = None) -> Seen:
    """``Seen`` of a split (of ``count`` volumes, evenly spread over it), whole or with one tissue left, each voxel by its share of it."""
    volumes, ages = getattr(data, split).images, np.array(getattr(data, split).labels, np.float64)
    chosen, parts = spread(len(ages), count), []
    regions = None if region is None else data.regions(split)
    for start in range(0, len(chosen), batch):
        part = chosen[start : start + batch]
        if regions is None:
            parts.append(read_by_head(model, volumes[part], batch))
            continue
        whole, share = (torch.from_numpy(np.array(each)) for each in (volumes[part], regions[part, region]))
        parts.append(read_by_head(model, isolate(whole, share), batch))
    return Seen(*(np.concatenate(found) for found in zip(*parts, strict=True)), ages[chosen])


def errors_of(model: nn.Module, data: Prepared, region: int | None, batch: int, count: int | None = None) -> dict[str, Any]:
    """Absolute errors of the test split, of the model as it is and of a linear probe for these volumes, and the probe's penalty.

    count: training volumes that the probe is fitted on; None for all.
    """
    train, validation, test = (seen(model, data, split, region, batch, count if split == "train" else None) for split in SPLITS)
    probe, penalty = linear_probe((train.features, train.ages), (validation.features, validation.ages))
    errors = {"raw": test.predicted, "probe": probe.predict(test.features)}
    return {"penalty": penalty} | {name: np.abs(found - test.ages).tolist() for name, found in errors.items()}


def summed(found: dict[str, Any], resamples: int) -> dict[str, float | None]:
    """The means of ``errors_of`` with their intervals."""
    rows = {"": "raw", "probe_": "probe"}
    means = {prefix: mean_interval(np.array(found[name]), resamples) for prefix, name in rows.items()}
    return {f"{prefix}{NAMES[key]}": value for prefix, mean in means.items() for key, value in mean.items()} | {"penalty": found["penalty"]}


def of_tissues(model: nn.Module, data: Prepared, settings: CohortChecks, parts: Kept) -> dict[str, dict[str, Any]]:
    """``errors_of`` the whole volume and each tissue alone; without tissue maps the whole volume only."""
    places = {"whole": None} | {region: index for index, region in enumerate(data.card["regions"])}
    return {name: parts.part(name, lambda index=index: errors_of(model, data, index, settings.batch, settings.probe)) for name, index in places.items()}


def order_of(tissues: dict[str, dict[str, Any]], resamples: int) -> list[dict[str, Any]] | None:
    """How much more the probe errs on one tissue than on the next, paired over the test volumes; None where one of them is missing.

    The order that is asked about, fluid, grey matter, white matter, is by how much a tissue's shape tells of age.
    """
    if any(name not in tissues for name in ORDER):
        return None
    rows = []
    for less, more in pairwise(ORDER):
        apart = np.array(tissues[more]["probe"]) - np.array(tissues[less]["probe"])
        found = bootstrap_mean(apart, resamples, lowest=-math.inf)
        rows.append({"less": less, "more": more, "difference": found.value, "low": found.low, "high": found.high})
    return rows


def rescanned(model: nn.Module, data: Prepared, source: Source, settings: CohortChecks, mae: float) -> dict[str, Any] | None:
    """``scanned_again`` for a simulated cohort, ``sessions_again`` for a real one."""
    return scanned_again(model, source, settings, mae) if source.kind == "phantom" else sessions_again(model, data, settings, mae)


def drawn(source: Source, subjects: list[tuple[float, str, int, int, int]]) -> np.ndarray:
    """Volumes float16 (N, 1, D, H, W) of simulated subjects (age, sex, seed, scan, site), as `prepare` would store them."""
    return np.stack(list(each(lambda subject: source.draw(*subject)[0], subjects)))


def unseen(source: Source, settings: CohortChecks, number: int) -> int:
    """The seed of a simulated person who is in no split of the cohort."""
    return source.person_seed(source.subjects + settings.seed * PEOPLE + number)


def aged(model: nn.Module, source: Source, settings: CohortChecks) -> dict[str, Any]:
    """The same subjects at every age; anatomy, scanner and their lead or lag of brain age stay."""
    rows = []
    for number in range(settings.subjects):
        seed, sex = unseen(source, settings, number), "FM"[number % 2]
        rows.append(answers(model, drawn(source, [(age, sex, seed, 0, 0) for age in settings.ages]), settings.batch))
    return ageing(settings.ages, np.stack(rows))


def scanned_again(model: nn.Module, source: Source, settings: CohortChecks, mae: float) -> dict[str, Any]:
    """How far the predictions for two scans of a subject are apart: at the same site, and at two sites; beside the test error."""
    ages = np.linspace(settings.ages[0], settings.ages[-1], settings.rescans)
    who = [(float(age), "FM"[number % 2], unseen(source, settings, PEOPLE // 2 + number)) for number, age in enumerate(ages)]
    first, again, elsewhere = (
        answers(model, drawn(source, [(*one, scan, site) for one in who]), settings.batch) for scan, site in ((0, 0), (1, 0), (1, 1))
    )
    same, other = (mean_interval(np.abs(found - first), settings.resamples) for found in (again, elsewhere))
    return {
        "pairs": len(who), "mean_abs_difference": same["value"], "low": same["low"], "high": same["high"], "mae": mae, "of": "simulated scans",
        "other_site_mean_abs_difference": other["value"], "other_site_low": other["low"], "other_site_high": other["high"],
    }  # fmt: skip


def sessions_again(model: nn.Module, data: Prepared, settings: CohortChecks, mae: float) -> dict[str, Any] | None:
    """The same of a real cohort's test participants with two sessions within ``years``, less the years between; None without any."""
    pairs = repeated(data.subjects("test"), settings.years)
    if not pairs:
        return None
    places = sorted({place for pair in pairs for place in pair})
    over = dict(zip(places, answers(model, data.test.images[places], settings.batch) - data.test.labels[places], strict=True))
    apart = mean_interval(np.array([abs(over[b] - over[a]) for a, b in pairs]), settings.resamples)
    return {"pairs": len(pairs), "mean_abs_difference": apart["value"], "low": apart["low"], "high": apart["high"], "mae": mae, "of": "sessions"}


def opened(phase: Phase) -> Prepared:
    """The prepared data. Raises StageError where it is no cohort of volumes with a real target."""
    data = Prepared.open(Path("artifacts/data") / phase)
    if not data.real:
        raise StageError(f"cohort_checks: data.{phase} has classes, not ages; allowed: a cohort (kind: phantom or bids)")
    return data


def cohort_checks(phase: Phase, method: str, seed: int) -> None:
    params, data = read(Params, phase=phase), opened(phase)
    settings, simulated = params.cohort_checks, params.source.kind == "phantom"
    with resumable("cohort_checks", params, __file__, phase, method, seed) as (run, parts):
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)
        found = of_tissues(model, data, settings, parts)
        tissues = {name: summed(errors, settings.resamples) for name, errors in found.items()}
        whole = tissues.pop("whole")
        rescans = parts.part("rescan", lambda: rescanned(model, data, params.source, settings, whole["mae"]))
        older = parts.part("ageing", lambda: aged(model, params.source, settings)) if simulated else None
        _draw(run, older)
        constant = median_mae(torch.from_numpy(data.train.labels), torch.from_numpy(data.test.labels))
        reasons = {} if simulated else {"ageing": SIMULATED_ONLY}
        reasons |= {} if rescans else {"rescan": f"no test participant has two sessions within {settings.years:g} years"}
        reasons |= {} if tissues else {"isolated": "the cohort has no tissue maps"}
        run.summary({
            "simulated": data.card["simulated"], "n_test": len(data.test.labels), "median_mae": constant, "whole": whole,
            "isolated": tissues or None, "order": order_of(found, settings.resamples), "ageing": older, "rescan": rescans, "reasons": reasons,
        })  # fmt: skip


def _draw(run: Run, older: dict[str, Any] | None) -> None:
    figures_errors = importlib.import_module("moecore.report.figures_errors")  # by name: a drawing is no input of a result

    if older:
        run.figure("ageing", figures_errors.ageing_curves(older["ages"], older["predictions"]))


if __name__ == "__main__":
    run_stage(cohort_checks)
