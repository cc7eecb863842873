"""The answers of all studies: what each claim and question found, judged by the claims as they are
now, with Holm's correction over studies; and what would decide the open ones: seeds, or items, and
how long the seeds would train (docs/methods.md, Statistics).
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.core.config import Config
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.claims.evaluation import (
    correct_by_paper,
    difference_from_json,
    judge_difference,
    p_of,
    verdict_after_holm,
    verdict_gap_and_level,
    verdict_to_json,
)
from moecore.report.tables.metrics_by_method import expected_metrics, read_comparison
from moecore.statistics.crossed import POWER, SEEDS, Difference, VarianceSource
from moecore.study.questions import Round
from moecore.study.sections import (
    Claim,
    Comparison,
    Question,
    Selection,
    compared_quantity_key,
    has_changed_settings,
)
from moecore.study.settings import extract_declared_settings
from moecore.study.stages import PHASES
from moecore.study.study import read_study

VERDICTS = {"open": "not significant"}  # how a verdict is printed, if not by its name
Studies = Mapping[str, Mapping[str, Any]]  # round of a question → result, {} where it was not run
MOST_SEEDS = 100
MOST_ITEMS = 10_000_000
MORE_ITEMS = 10


class DeclaredClaims(Config):
    """What of a study's params.yaml is judged."""

    run: Selection
    claims: tuple[Claim, ...] = ()
    questions: tuple[Question, ...] = ()


class Answer(NamedTuple):
    """A claim or question of a study, and its entry in compare.json, if any."""

    study: str
    command: str  # that runs it
    claim: Claim | Question
    entry: dict[str, Any]  # of compare.json; {} where nothing was found
    state: str  # of what was not found: not run yet
    changed: bool  # whether settings were changed since
    good: str = ""  # "higher" or "lower", what is better for the metric of a no_worse

    @property
    def words(self) -> Mapping[str, str]:
        """verdict → how it is printed, if not by its name."""
        if isinstance(self.claim, Question):
            return VERDICTS | ANSWERS
        if self.claim.margin:
            return VERDICTS | {"holds": self.claim.better.replace("_", " ")}
        return VERDICTS

    @property
    def verdict(self) -> str:
        """The verdict as it is printed; "not run yet" where nothing was found."""
        verdict = self.entry.get("verdict", "not run yet")
        return self.words.get(verdict, verdict)

    @property
    def verdict_holm(self) -> str:
        """The verdict as it is printed, after Holm's correction where there is one."""
        verdict = self.entry.get("verdict_holm")
        return self.words.get(verdict, verdict) if verdict else self.verdict


def evaluate_results(rounds: Iterable[Round]) -> tuple[Studies, list[Answer]]:
    """Return what the last run of every round found, and all answers, judged by the claims as they
    are now, with Holm's correction over all claims of a paper.
    """
    studies: dict[str, Mapping[str, Any]] = {}
    answers: list[Answer] = []
    for one in rounds:
        compared = read_comparison(one.results) if one.results.exists() else {}
        studies[one.name] = compared
        answers += _answers_of_round(one, compared)
    return studies, _with_holm(answers)


def _answers_of_round(one: Round, compared: Mapping[str, Any]) -> Iterator[Answer]:
    composed = one.compose()
    asked = extract_declared_settings(DeclaredClaims, composed.document)
    entries = [*compared.get("claims", {}).values(), *compared.get("questions", {}).values()]
    measured = {
        compared_quantity_key(entry["asked"]): entry for entry in entries if _has_all(entry)
    }
    state = "not run yet with this claim" if compared else "not run yet"
    for claim in (*asked.claims, *asked.questions):
        entry = measured.get(compared_quantity_key(claim.model_dump()), {})
        changed = has_changed_settings(entry.get("settings"), composed.document.data, claim)
        good = ""
        if entry and claim.better == "no_worse":
            study = read_study(composed.document)
            metrics = expected_metrics(study, composed.all_stages, claim.phase)
            good = metrics[claim.metric].better
        if entry:
            entry = judge_again(entry, claim, good)
        yield Answer(one.name, one.command, claim, entry, state, changed, good)


def _has_all(entry: Mapping[str, Any]) -> bool:
    """Return whether a verdict follows from an entry; from those of older versions it does not."""
    return entry.keys() >= {"asked", "form"} and (
        "interval" not in entry["difference"] or "variances" in entry["difference"]
    )


def judge_again(
    entry: Mapping[str, Any], claim: Claim | Question, good: str = ""
) -> dict[str, Any]:
    """Return an entry of ``claims`` or ``questions`` with the verdict on ``claim``, uncorrected.

    entry: of the same quantity (``compared_quantity_key``); good: what is better for the metric.
    """
    difference = difference_from_json(entry)
    verdict = judge_difference(difference, claim, good)
    p = p_of(difference, claim, good)
    kept = {key: entry[key] for key in ("method", "against", "form", "settings") if key in entry}
    judged = verdict_to_json(difference, entry["form"], verdict, p, None)
    return kept | judged | {"asked": claim.model_dump(mode="json", exclude_none=True)}


def _with_holm(answers: Sequence[Answer]) -> list[Answer]:
    corrected = correct_by_paper([(one.claim, one.entry.get("p")) for one in answers])
    entries = [
        one.entry and one.entry | {"verdict_holm": verdict_after_holm(one.entry["verdict"], p)}
        for one, p in zip(answers, corrected, strict=True)
    ]
    return [one._replace(entry=entry) for one, entry in zip(answers, entries, strict=True)]


def count_facts_once(claims: Sequence[Answer]) -> list[Answer]:
    """Return the claims without those that another study judges, too: one quotation, direction and
    printed effect are one fact, which counts in the first study that answers it, if any does.
    """
    studies: dict[tuple[Any, ...], str] = {}
    for answer in sorted(claims, key=lambda one: not one.entry):
        studies.setdefault(_fact_key(answer.claim), answer.study)
    return [one for one in claims if studies[_fact_key(one.claim)] == one.study]


def _fact_key(claim: Claim | Question) -> tuple[Any, ...]:
    assert isinstance(claim, Claim), "a question is no fact of a paper"
    return claim.paper, claim.source, claim.quote, claim.better, claim.effect


class RequiredSampleSizes(NamedTuple):
    """The least seeds, and the least items, each with as many of the other as there are."""

    seeds: int | None  # None: no number up to MOST_SEEDS
    items: int | None  # None: no number up to MOST_ITEMS, or the metric has no items
    seeds_of_more_items: int | None  # with MORE_ITEMS times the items


def needed_sample(
    difference: Difference, asked: Comparison, good: str, tests: int = 1
) -> RequiredSampleSizes:
    """Return what decides with 80 % power where the true difference is the measured one.

    good: "higher" or "lower", what is better for the metric; tests: at a level of 5 % over so many,
    which is enough for Holm's correction, whatever the others find.
    """
    gap, level = verdict_gap_and_level(difference, asked, good)
    level = 1 - (1 - level) / tests

    def decides(seeds: int, items: int) -> bool:
        planned = _with_sample(difference, seeds, items)
        reach, more = planned.half(level), planned.half(2 * POWER - 1)
        return reach is not None and more is not None and reach + more <= abs(gap)

    seeds, items = difference.seeds, difference.items
    numbers = range(seeds, MOST_SEEDS + 1) if seeds > 1 else ()
    enough, fewer = (
        next((number for number in numbers if decides(number, there)), None)
        for there in (items, MORE_ITEMS * items)
    )
    if not items or not decides(seeds, MOST_ITEMS):
        return RequiredSampleSizes(enough, None, fewer)
    low, high = items - 1, MOST_ITEMS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(seeds, middle) else (middle, high)
    return RequiredSampleSizes(enough, high, fewer)


def describe_open_answers(answers: Sequence[Answer], studies: Studies) -> list[str]:
    """Return a line for each question that is open and each claim that is with Holm's correction,
    quickest first, then for those that have no interval, and those that were not run.
    """
    claims = [one for one in answers if isinstance(one.claim, Claim)]
    families = Counter(one.claim.paper for one in claims if "p" in one.entry)
    lines = []
    for answer in answers:
        if not answer.entry:
            lines.append(((2, 0.0), f"{_describe_comparison(answer)}: {answer.state}"))
        elif (answer.entry.get("verdict_holm") or answer.entry["verdict"]) == "open":
            lines.append(
                _describe_plan(answer, studies[answer.study], families[answer.claim.paper])
            )
    return [line for _, line in sorted(lines, key=lambda one: one[0])]


def _describe_plan(
    answer: Answer, compared: Mapping[str, Any], tests: int
) -> tuple[tuple[int, float], str]:
    """Return the order and the line of an answer; tests: how many claims of its paper have one."""
    difference = difference_from_json(answer.entry)
    row = build_claim_row(answer.entry)
    if not difference.sources:
        return (1, 0.0), f"{_describe_comparison(answer)}: {row.difference}: {row.over}"
    minutes = _minutes_of_a_seed(compared, answer.claim)
    ways = []
    sample = needed_sample(difference, answer.claim, answer.good)
    if answer.entry["verdict"] == "open":
        ways.append(_describe_ways(difference, sample, minutes))
    if isinstance(answer.claim, Claim) and tests > 1:
        sample = needed_sample(difference, answer.claim, answer.good, tests)
        words = _describe_ways(difference, sample, minutes)
        ways.append(f"with Holm's correction over {tests} claims: {words}")
    order = math.inf
    if sample.seeds is not None:
        order = (sample.seeds - difference.seeds) * minutes
    measured = f"{row.difference} [{row.difference_limits}]"
    return (0, order), f"{_describe_comparison(answer)}: {measured}: {'; '.join(ways)}"


def _describe_comparison(answer: Answer) -> str:
    """Return study, paper, table and phase, and what is compared."""
    claim = answer.claim
    source = claim.source if isinstance(claim, Claim) else "question"
    place = ", ".join(filter(None, (claim.paper, source, claim.phase)))
    return f"{answer.study}: {place}: {claim.words}"


def _with_sample(difference: Difference, seeds: int, items: int) -> Difference:
    """Return the difference that a sample of this size would have, of the same scatter.

    A = var(seed means)/S goes with 1/S, B = var(item means)/n with 1/n.
    """
    numbers = [(difference.seeds, seeds), (difference.items, items)]
    if len(difference.sources) == 1:
        numbers = numbers[:1] if difference.kind == SEEDS else numbers[1:]
    sources = tuple(
        VarianceSource(source.variance * now / then, then - 1)
        for source, (now, then) in zip(difference.sources, numbers, strict=True)
    )
    return difference._replace(sources=sources, seeds=seeds, items=items)


def _minutes_of_a_seed(compared: Mapping[str, Any], asked: Comparison) -> float:
    """Return how long both methods trained with one seed, in all phases up to that asked about."""
    phases = PHASES[: PHASES.index(asked.phase) + 1]
    methods = dict.fromkeys((asked.method, asked.against))
    cells = [compared[name].get(phase, {}).get("seconds") for name in methods for phase in phases]
    return sum(cell["mean"] for cell in cells if cell) / 60


def _describe_ways(difference: Difference, sample: RequiredSampleSizes, minutes: float) -> str:
    """Return the seeds or items in words; minutes: of a seed."""
    ways = []
    if sample.seeds is not None:
        more = sample.seeds - difference.seeds
        ways.append(f"{sample.seeds} seeds ({more} more, {more * minutes:.0f} min of training)")
    if sample.items is not None:
        ways.append(f"{sample.items:,} items in place of {difference.items:,}")
    if not ways and sample.seeds_of_more_items is not None:
        items = f"{MORE_ITEMS * difference.items:,} items in place of {difference.items:,}"
        ways.append(f"{sample.seeds_of_more_items} seeds with {items}")
    return " or ".join(ways) or f"no number of seeds up to {MOST_SEEDS}"
