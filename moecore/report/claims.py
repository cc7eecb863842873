"""What the papers say of two methods, and whether the runs bear it out: paired by seed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from moecore.core.files import UserError
from moecore.report.cells import Cell, as_json, cell
from moecore.report.column import Metric
from moecore.report.measured import Phase, Results
from moecore.report.significance import differences
from moecore.report.tables import table
from moecore.statistics.intervals import Interval, over_seeds
from moecore.study.selection import Claim

T = TypeVar("T")


class Evaluated(NamedTuple):
    """A claim with what was measured; ``difference`` is method − against, paired by seed."""

    claim: Claim
    metric: Metric
    ours: Cell
    theirs: Cell
    difference: Interval
    verdict: str  # "holds", "contradicted" or "open"


class Known(NamedTuple):
    """The metrics of one phase that any method has."""

    phase: Phase
    metrics: Mapping[str, Metric]


def evaluate(claims: Sequence[Claim], results: Results) -> list[Evaluated]:
    """Every claim with its verdict.

    Raises UserError for an unknown phase, method or metric, and for a method that lacks the
    metric, naming ``claims[i]`` and what is allowed.
    """
    phases = {
        name: Known(phase, {metric.name: metric for metric in table(results, phase).metrics})
        for name, phase in (results.phases.items() if claims else ())
    }
    return [_evaluate(claim, f"claims[{i}]", phases) for i, claim in enumerate(claims)]


def verdict(difference: Interval, better: str) -> str:
    """holds: the interval lies in the claimed direction; contradicted: in the other.

    open: it includes 0, or one seed has no interval.
    """
    limits = difference.limits
    if limits is None or limits[0] <= 0 <= limits[1]:
        return "open"
    return "holds" if (limits[0] > 0) == (better == "higher") else "contradicted"


def flat_claims(evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """The entry ``claims`` of compare.json: what is claimed → values, difference, verdict.

    {} without claims.
    """
    return {f"{i}: {_words(found.claim)}": _entry(found) for i, found in enumerate(evaluated)}


def _words(claim: Claim) -> str:
    ours = f"{claim.metric} of {claim.method}"
    return f"{claim.paper}, {claim.phase}: {ours} {claim.better} than of {claim.against}"


def _entry(found: Evaluated) -> dict[str, Any]:
    kind = "t" if found.difference.limits else ""
    return {
        "method": as_json(found.ours),
        "against": as_json(found.theirs),
        "difference": as_json(Cell(found.difference, kind, found.ours.seeds)),
        "verdict": found.verdict,
    }


def _evaluate(claim: Claim, place: str, phases: Mapping[str, Known]) -> Evaluated:
    known = _among(phases, claim.phase, f"{place}.phase")
    models = known.phase.models
    metric = _among(known.metrics, claim.metric, f"{place}.metric")
    ours = _among(models, claim.method, f"{place}.method")
    others = {name: found for name, found in models.items() if name != claim.method}
    theirs = _among(others, claim.against, f"{place}.against")
    cells = {name: cell(metric, list(seeds.values())) for name, seeds in models.items()}
    having = {name: found for name, found in cells.items() if found is not None}
    for key, name in (("method", claim.method), ("against", claim.against)):
        if name not in having:
            lacks = f"{name} has no {claim.metric}; allowed: {_listed(having)}"
            raise UserError(f"{place}.{key}: {lacks}")
    difference = over_seeds(differences(metric, ours, theirs))
    return Evaluated(
        claim,
        metric,
        having[claim.method],
        having[claim.against],
        difference,
        verdict(difference, claim.better),
    )


def _among(allowed: Mapping[str, T], name: str, place: str) -> T:
    if name not in allowed:
        raise UserError(f"{place}: found {name!r}; allowed: {_listed(allowed)}")
    return allowed[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
