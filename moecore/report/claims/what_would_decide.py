"""What would decide an open claim or question: so many seeds, or so many items, and how long the
seeds would train (docs/methods.md, Statistics).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from moecore.report.claims.claims_page import Answer, Studies
from moecore.report.claims.claims_table import build_claim_row
from moecore.report.claims.evaluation import verdict_gap_and_level
from moecore.report.claims.stored_verdicts import rebuild_difference
from moecore.statistics.crossed import POWER, SEEDS, Difference, VarianceSource
from moecore.study.sections import Claim, Comparison, Phase

MOST_SEEDS = 100
MOST_ITEMS = 10_000_000
MORE_ITEMS = 10
PHASES: tuple[Phase, ...] = get_args(Phase)


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
    difference = rebuild_difference(answer.entry)
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
