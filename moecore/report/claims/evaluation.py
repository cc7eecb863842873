"""Verdicts on claims and questions about two methods, and whether data can tell routers apart.

The control is a learned router against experts chosen by a fixed hash. Where its interval includes
0, a difference of accuracy between routers says little about routing (assay sensitivity).
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moecore.core.files import UserError
from moecore.report.claims import significance
from moecore.report.column import Column, score_slug
from moecore.report.result_types import Models, PhaseResults, StudyResults, parse_params_as_mapping
from moecore.report.results_and_displays import results_by_phase_or_calculation
from moecore.report.tables import cells
from moecore.report.tables.cells import Cell, NumberFormat, cell_to_json, method_cells_over_seeds
from moecore.report.tables.metrics_by_method import build_table, phase_result_columns
from moecore.statistics.comparisons import CONFIDENCE_LEVEL as LEVEL_OF_INTERVALS
from moecore.statistics.comparisons import Difference, SourceVariance, holm
from moecore.statistics.intervals import Interval
from moecore.study.run_and_claims import (
    Claim,
    Comparison,
    Question,
    RunSelection,
    answer_settings_digest,
    compared_quantity_key,
)

T = TypeVar("T")
SECTIONS = {Claim: "claims", Question: "questions"}  # of params.yaml and compare.json


class EvaluatedClaim(NamedTuple):
    claim: Claim | Question
    metric: Column
    ours: Cell
    theirs: Cell
    difference: Difference
    verdict: str  # "holds", "differs" or "open"
    p: float | None  # of the verdict's test; None without an interval
    values: tuple[np.ndarray, np.ndarray]  # of both sides, (S, N) or (S,), before the difference
    p_holm: float | None = None  # corrected over the claims of a paper; None for questions

    @property
    def verdict_holm(self) -> str:
        return verdict_after_holm(self.verdict, self.p_holm)


def evaluate_claims(
    claims: Sequence[Claim | Question], results: StudyResults
) -> list[EvaluatedClaim]:
    """Evaluate each claim and question on ``results``; claims get Holm's correction per paper."""
    if not claims:
        return []
    subjects = results_by_phase_or_calculation(results)
    tables = {name: build_table(results, phase).metrics for name, phase in subjects.items()}
    counts = {Claim: count(), Question: count()}
    evaluated = []
    for claim in claims:
        place = f"{SECTIONS[type(claim)]}[{next(counts[type(claim)])}]"
        columns = _require_entry(tables, claim.subject, f"{place}.phase")
        metrics = {column.name: column for column in columns}
        evaluated.append(_evaluate_claim(claim, place, metrics, subjects[claim.subject].models))
    corrected = holm_by_paper(claims, [answer.p for answer in evaluated])
    return [answer._replace(p_holm=p) for answer, p in zip(evaluated, corrected, strict=True)]


def describe_missing_metric(claim: Comparison, results: StudyResults) -> str:
    """Return "METHOD has no METRIC" for the first side of a claim without a value; "" if none."""
    phase = results_by_phase_or_calculation(results)[claim.subject]
    metrics = {metric.name: metric for metric in phase_result_columns(phase)}
    sides = ((claim.method, claim.metric), (claim.against, claim.against_metric or claim.metric))
    for method, name in sides:
        if name not in metrics or not method_cells_over_seeds(metrics[name], phase.models)[method]:
            return f"{method} has no {name}"
    return ""


def split_claims_and_questions(
    evaluated: Sequence[EvaluatedClaim],
) -> tuple[list[EvaluatedClaim], list[EvaluatedClaim]]:
    claims = [answer for answer in evaluated if isinstance(answer.claim, Claim)]
    return claims, [answer for answer in evaluated if isinstance(answer.claim, Question)]


def holm_by_paper(
    comparisons: Sequence[Claim | Question], ps: Sequence[float | None]
) -> list[float | None]:
    """Return the p-values after Holm's correction over each paper's claims; questions: None."""
    families: dict[str, dict[int, float]] = defaultdict(dict)  # paper → place → p
    for place, (claim, p) in enumerate(zip(comparisons, ps, strict=True)):
        if isinstance(claim, Claim) and p is not None:
            families[claim.paper][place] = p
    corrected: list[float | None] = [None] * len(ps)
    for values in families.values():
        for place, p in zip(values, holm(list(values.values())), strict=True):
            corrected[place] = p
    return corrected


def verdict_on_difference(difference: Difference, comparison: Comparison, good: str = "") -> str:
    """Return "holds", "differs" or "open" (as without interval); ``good``: the better direction."""
    # Conditions of holds / differs; else open. higher, lower: the 95 % interval lies on the claimed
    # / the other side of 0. equivalent: the 90 % interval lies within ±margin (two one-sided tests
    # at 5 %) / the 95 % interval outside. no_worse: the one-sided 95 % limit lies on the good side
    # of −margin / the 95 % interval on the bad side. good: the metric's better direction.
    p = verdict_p_value(difference, comparison, good)
    return verdict_from_p(p, difference, comparison, good)


def verdict_from_p(
    p: float | None, difference: Difference, comparison: Comparison, good: str = ""
) -> str:
    """Return "open" if ``p`` ≥ 5 % or None; else "holds" or "differs", by side of 0 or margin."""
    if p is None or p >= significance.LEVEL:
        return "open"
    is_as_claimed = (difference.value > 0) == (comparison.better == "higher")
    if comparison.margin is not None:
        is_as_claimed = _distance_to_margin(difference, comparison, good) > 0
    return "holds" if is_as_claimed else "differs"


def verdict_p_value(difference: Difference, comparison: Comparison, good: str = "") -> float | None:
    """Return p for the difference being 0, or at the margin's end; None without an interval."""
    # A direction has a two-sided test. With a margin the test is one-sided if the difference lies
    # on the margin's good side (equivalence: the larger p of two one-sided tests), else two-sided.
    if comparison.margin is None:
        return difference.p
    gap, _ = verdict_gap_and_level(difference, comparison, good)
    p = difference.p_at_distance(abs(gap))
    return p / 2 if p is not None and gap >= 0 else p


def verdict_gap_and_level(
    difference: Difference, comparison: Comparison, good: str
) -> tuple[float, float]:
    """Return the distance that a claim's test measures, and its interval's confidence level.

    Without a margin: |difference|. With one: the distance to the margin, < 0 if the difference
    violates it. good: whether "higher" or "lower" is better for the metric.
    """
    if comparison.margin is None:
        return abs(difference.value), LEVEL_OF_INTERVALS
    gap = _distance_to_margin(difference, comparison, good)
    return gap, 2 * LEVEL_OF_INTERVALS - 1 if gap >= 0 else LEVEL_OF_INTERVALS


def _distance_to_margin(difference: Difference, comparison: Comparison, good: str) -> float:
    assert comparison.margin is not None  # as Comparison requires
    if comparison.better == "equivalent":
        return comparison.margin - abs(difference.value)
    return comparison.margin + {"higher": 1, "lower": -1}[good] * difference.value


def claims_for_compare_json(
    evaluated: Sequence[EvaluatedClaim], study: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Build the sections ``claims`` and ``questions`` of compare.json: text of a claim → numbers.

    Empty sections are left out. study: parsed params.yaml, to add digests of claims' settings.
    """
    entries_by_section: dict[str, dict[str, Any]] = defaultdict(dict)
    for answer in evaluated:
        claim = answer.claim
        entries = entries_by_section[SECTIONS[type(claim)]]
        start = ", ".join(filter(None, (claim.paper, claim.subject)))
        entry = claim_to_json(answer)
        if study is not None:
            entry["settings"] = answer_settings_digest(study, claim)
        entries[f"{len(entries)}: {start}: {claim.words}"] = entry
    return dict(entries_by_section)


def claim_to_json(evaluated_claim: EvaluatedClaim) -> dict[str, Any]:
    claim, metric, ours, theirs, difference, verdict, p, _, p_holm = evaluated_claim
    return {
        "asked": claim.model_dump(mode="json", exclude_none=True),
        "method": cell_to_json(ours, metric.form),
        "against": cell_to_json(theirs, metric.form),
        **verdict_to_json(difference, metric.form, verdict, p, p_holm),
        "form": metric.form,
    }


def verdict_to_json(
    difference: Difference, form: str, verdict: str, p: float | None, p_holm: float | None
) -> dict[str, Any]:
    """Return difference, verdict and p-values as entries of compare.json."""
    cell = cell_to_json(Cell(difference.interval(), difference.kind, difference.seeds), form)
    cell["items"] = difference.items
    if difference.sources:
        cell["variances"], cell["freedoms"] = map(list, zip(*difference.sources, strict=True))
    entry: dict[str, Any] = {"difference": cell, "verdict": verdict, "p": p, "p_holm": p_holm}
    entry["verdict_holm"] = verdict_after_holm(verdict, p_holm)
    entry["smallest"] = difference.detectable_difference
    return {name: value for name, value in entry.items() if value not in (None, "")}


def difference_from_json(entry: Mapping[str, Any]) -> Difference:
    stored = entry["difference"]
    pairs = zip(stored.get("variances", ()), stored.get("freedoms", ()), strict=True)
    sources = tuple(SourceVariance(*pair) for pair in pairs)
    kind = stored["interval"] if sources else ""
    return Difference(stored["mean"], sources, kind, stored["seeds"], stored.get("items", 0))


def verdict_after_holm(verdict: str, p_holm: float | None) -> str:
    if p_holm is None:
        return ""
    return verdict if p_holm < significance.LEVEL else "open"


def drop_zero_width_interval(difference: Difference) -> Difference:
    half = difference.half_width()
    if half is not None and half < cells.ROUNDING_WIDTH:
        return difference._replace(sources=(), kind="")
    return difference


def _evaluate_claim(
    claim: Claim | Question, place: str, metrics: Mapping[str, Column], models: Models
) -> EvaluatedClaim:
    metric = other = _require_entry(metrics, claim.metric, f"{place}.metric")
    rivals = {name: seeds for name, seeds in models.items() if name != claim.method}
    if claim.against_metric:
        rivals = models
        key = f"{place}.against_metric"
        other = _require_entry(metrics, claim.against_metric, key)
        if other.form != metric.form:
            units = f"{other.name} is a {other.form}, and {metric.name} a {metric.form}"
            raise UserError.at(key, found=units, allowed="a metric of the same unit")
    ours = _require_entry(models, claim.method, f"{place}.method")
    theirs = _require_entry(rivals, claim.against, f"{place}.against")
    # Checked first, because the difference's message for a missing metric is less clear.
    first = _require_cell(metric, models, claim.method, f"{place}.method")
    second = _require_cell(other, models, claim.against, f"{place}.against")
    values = significance.pair_values_by_seed(ours, metric, theirs, other, f"{place}.metric")
    difference = drop_zero_width_interval(significance.crossed_or_paired_difference(*values))
    if metric.has_bound(ours.values()) or other.has_bound(theirs.values()):
        difference = difference._replace(sources=(), kind="")
    verdict = verdict_on_difference(difference, claim, metric.better)
    p = verdict_p_value(difference, claim, metric.better)
    return EvaluatedClaim(claim, metric, first, second, difference, verdict, p, values)


def _require_cell(metric: Column, models: Models, method: str, place: str) -> Cell:
    by_method = method_cells_over_seeds(metric, models)
    cell = by_method[method]
    if cell is None:
        having = ", ".join(name for name, other in by_method.items() if other) or "none"
        raise UserError(f"{place}: {method} has no {metric.name}; allowed: {having}")
    return cell


def _require_entry(allowed: Mapping[str, T], name: str, place: str) -> T:
    if name not in allowed:
        raise UserError.at(place, found=repr(name), allowed=", ".join(allowed) or "none")
    return allowed[name]


AnyComparison = TypeVar("AnyComparison", bound=Comparison)


def split_answerable_comparisons(
    comparisons: Iterable[AnyComparison], run: RunSelection
) -> tuple[list[AnyComparison], list[AnyComparison]]:
    """Return comparisons that ``run`` can answer (claims on models need 2 seeds), and others."""
    answerable: list[AnyComparison] = []
    waiting: list[AnyComparison] = []
    for comparison in comparisons:
        methods = {comparison.method, comparison.against}
        has_models = methods <= set(run.methods) and comparison.phase in run.phases
        has_seeds = len(run.seeds) > 1 or not isinstance(comparison, Claim)
        is_calculated = methods <= set(run.calculations)
        chosen = answerable if is_calculated or (has_models and has_seeds) else waiting
        chosen.append(comparison)
    return answerable, waiting


def print_and_drop_unanswerable(
    comparisons: Iterable[AnyComparison], run: RunSelection, results: StudyResults
) -> list[AnyComparison]:
    """Return the claims and questions that ``results`` can answer; print why others cannot be."""
    complete, waiting = split_answerable_comparisons(comparisons, run)
    answerable = []
    for comparison in complete:  # ``moecore check`` does not foresee every missing metric
        if missing := describe_missing_metric(comparison, results):
            text = f"not answered: {comparison.words}, {comparison.phase}: {missing}"
            print(text, file=sys.stderr)
        else:
            answerable.append(comparison)
    if waiting:
        print(describe_waiting_claims(waiting, run), file=sys.stderr)
    return answerable


def describe_waiting_claims(waiting: Sequence[Comparison], run: RunSelection) -> str:
    named = [name for comparison in waiting for name in (comparison.method, comparison.against)]
    missing = [f"method {name}" for name in dict.fromkeys(named) if name not in run.methods]
    phases = dict.fromkeys(comparison.phase for comparison in waiting)
    missing += [f"phase {phase}" for phase in phases if phase not in run.phases]
    if len(run.seeds) < 2 and any(isinstance(comparison, Claim) for comparison in waiting):
        missing.append("a second seed")
    return f"{len(waiting)} claims and questions wait for {', '.join(missing)}"


CONTROL_ASKS = "can these data tell routers apart: is a learned router better than a fixed hash?"
LEARNED, FIXED = "noisy_top_k", "hash"  # kinds of routers
PREFERRED_LEARNED = "vmoe"  # if several methods with a learned router match the control
SHARED_SETTINGS = ("experts", "blocks", "model")  # equal in both methods of the control


class ControlPair(NamedTuple):
    """Two methods that differ only in their router: a learned router, and a fixed hash."""

    learned: str
    fixed: str


def find_control_pair(methods: Mapping[str, Mapping[str, Any] | None]) -> ControlPair | None:
    """Return a learned and a hash-routed method, equal in k and ``SHARED_SETTINGS``, or None."""
    settings = {name: method or {} for name, method in methods.items()}
    routers = {name: method.get("router") or {} for name, method in settings.items()}
    for fixed in (name for name, router in routers.items() if router.get("kind") == FIXED):
        partners = [
            name
            for name, router in routers.items()
            if router.get("kind") == LEARNED
            and router.get("k") == routers[fixed].get("k")
            and all(settings[name].get(key) == settings[fixed].get(key) for key in SHARED_SETTINGS)
        ]
        if partners:
            learned = PREFERRED_LEARNED if PREFERRED_LEARNED in partners else partners[0]
            return ControlPair(learned, fixed)
    return None


def find_trained_control_pair(results: StudyResults) -> ControlPair | None:
    methods = parse_params_as_mapping(results.settings).get("methods") or {}
    return find_control_pair({name: methods.get(name) for name in results.methods})


def build_control_questions(results: StudyResults, asked: Sequence[Comparison]) -> list[Question]:
    """Return the questions "learned router against hash", one per phase, that ``asked`` lacks."""
    pair = find_trained_control_pair(results)
    if pair is None:
        return []
    keys = {compared_quantity_key(comparison.model_dump()) for comparison in asked}
    learned, fixed = pair
    questions = []
    for phase in [phase for phase in results.phases.values() if phase.seeds > 1]:
        metric = f"test_{score_slug(phase.task.score)}"
        question = Question(
            asks=CONTROL_ASKS,
            metric=metric,
            method=learned,
            against=fixed,
            better=phase.task.score.better,
            phase=phase.name,
        )
        if compared_quantity_key(question.model_dump()) not in keys:
            questions.append(question)
    return questions


def describe_whether_routers_differ(results: StudyResults, phase: PhaseResults) -> str:
    """Return a sentence on learned router − hash with its interval; "" without an interval."""
    pair = find_trained_control_pair(results)
    score = f"test_{score_slug(phase.task.score)}"
    column = next((column for column in phase_result_columns(phase) if column.name == score), None)
    if pair is None or column is None:
        return ""
    learned, fixed = pair
    models = {name: phase.models[name] for name in pair}
    tested = significance.compare_with_reference(column, models, fixed).get(learned)
    if tested is None or tested.difference.limits is None:
        return ""
    number_format = NumberFormat.of(column.form, [tested.difference])
    shown = number_format.difference(tested.difference.value)
    limits = number_format.difference_limits(tested.difference)
    can = "can" if excludes_zero(tested.difference) else "are not shown to"
    return f"{learned} − {fixed} = {shown} [{limits}]: these data {can} tell routers apart"


def excludes_zero(difference: Interval) -> bool:
    return difference.limits is not None and math.prod(difference.limits) > 0
