"""What the papers say of two methods, and whether the runs bear it out: paired by seed, with Student's interval."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from moecore.config import Config
from moecore.evaluation.intervals import Interval, over_seeds
from moecore.files import StageError
from moecore.report.metric import Metric, number
from moecore.report.results import Results
from moecore.report.tables import Cell, as_json, cell, table
from moecore.selection import Phase

T = TypeVar("T")


class Claim(Config):
    """One sentence of a paper, put so that it can be measured: ``method`` has a better ``metric`` than ``against``."""

    paper: str = Field(min_length=1, description="Whose claim it is.")
    says: str = Field(min_length=1, description="The claim in plain words.")
    metric: str = Field(description="A metric of reports/compare.json.")
    method: str = Field(description="The method that the paper says is better; one of run.methods.")
    against: str = Field(description="The method that it is compared with; one of run.methods.")
    better: Literal["higher", "lower"] = Field(description="The direction that the paper claims.")
    phase: Phase = Field("pretrain", description="Which models are compared.")


class Judged(NamedTuple):
    """A claim with what was measured; ``difference`` is method − against, paired by seed."""

    claim: Claim
    metric: Metric
    ours: Cell
    theirs: Cell
    difference: Interval
    verdict: str  # "holds", "contradicted" or "open"


def judge(claims: Sequence[Claim], results: Results) -> list[Judged]:
    """Every claim with its verdict.

    Raises StageError for an unknown phase, method or metric, and for a method that lacks the metric, naming ``claims[i]`` and what is allowed.
    """
    return [_judge(claim, f"claims[{number}]", results) for number, claim in enumerate(claims)]


def verdict(difference: Interval, better: str) -> str:
    """holds: the interval lies in the claimed direction; contradicted: in the other; open: it includes 0, or one seed has no interval."""
    if difference.low is None or difference.low <= 0 <= difference.high:
        return "open"
    return "holds" if (difference.low > 0) == (better == "higher") else "contradicted"


def flat_claims(judged: Sequence[Judged]) -> dict[str, Any]:
    """The entry ``claims`` of compare.json: what is claimed → both values, the difference with its limits, seeds, verdict; {} without claims."""
    return {f"{number}: {_words(found.claim)}": _entry(found) for number, found in enumerate(judged)}


def _words(claim: Claim) -> str:
    return f"{claim.paper}, {claim.phase}: {claim.metric} of {claim.method} {claim.better} than of {claim.against}"


def _entry(found: Judged) -> dict[str, Any]:
    difference = as_json(Cell(found.difference, "t" if found.difference.low is not None else "", found.ours.seeds))
    return {"method": as_json(found.ours), "against": as_json(found.theirs), "difference": difference, "verdict": found.verdict}


def _judge(claim: Claim, place: str, results: Results) -> Judged:
    models = _among(results.models, claim.phase, f"{place}.phase")
    known = {metric.name: metric for metric in table(results, claim.phase)[0]}
    metric = _among(known, claim.metric, f"{place}.metric")
    ours = _among(models, claim.method, f"{place}.method")
    theirs = _among({name: found for name, found in models.items() if name != claim.method}, claim.against, f"{place}.against")
    having = [name for name, seeds in models.items() if cell(metric, list(seeds.values())) is not None]
    for key, name in (("method", claim.method), ("against", claim.against)):
        if name not in having:
            raise StageError(f"{place}.{key}: {name} has no {claim.metric}; allowed: {', '.join(having)}")
    difference = over_seeds([number(metric.read(ours[seed])) - number(metric.read(theirs[seed])) for seed in ours])
    cells = (cell(metric, list(seeds.values())) for seeds in (ours, theirs))
    return Judged(claim, metric, *cells, difference, verdict(difference, claim.better))


def _among(allowed: Mapping[str, T], name: str, place: str) -> T:
    if name not in allowed:
        raise StageError(f"{place}: found {name!r}; allowed: {_listed(allowed)}")
    return allowed[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
