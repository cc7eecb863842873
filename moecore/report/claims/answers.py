"""The answers of all studies to claims and questions, and the sample that would decide open ones.

Stored results are judged by the claims as they are now, with Holm's correction over all studies.
Sample sizes: docs/methods.md, Statistics.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.core.config import Config
from moecore.report.claims import evaluation, result_evidence
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.tables.metrics_by_method import expected_metrics, read_comparison
from moecore.statistics.comparisons import POWER, SEEDS, Difference, VarianceSource
from moecore.study import sections
from moecore.study.questions import Round
from moecore.study.settings import extract_declared_settings
from moecore.study.stages import PHASES
from moecore.study.study import read_study

VERDICTS = {"open": "not significant"}  # verdict → its text, if that is not its name
Studies = Mapping[str, Mapping[str, Any]]  # round of a question → result, {} if it was not run
MOST_SEEDS = 100
MOST_ITEMS = 10_000_000
MORE_ITEMS = 10  # factor


class DeclaredClaims(Config):
    """The sections of a params.yaml that claims depend on."""

    run: sections.Selection
    claims: tuple[sections.Claim, ...] = ()
    questions: tuple[sections.Question, ...] = ()


class Answer(NamedTuple):
    """A claim or question of a round, with its numbers in compare.json, if it was run."""

    study: str
    command: str  # that runs the round
    claim: sections.Claim | sections.Question
    entry: dict[str, Any]  # of compare.json; {} if it has none
    state: str  # why there is no entry: "not run yet"
    changed: bool  # whether settings changed after the run
    good: str = ""  # for no_worse: whether "higher" or "lower" is better for the metric

    @property
    def source(self) -> str:
        """Return the place of a claim in its paper; "" for a question."""
        return self.claim.source if isinstance(self.claim, sections.Claim) else ""

    @property
    def words(self) -> Mapping[str, str]:
        """Verdict → printed text, where that is not the verdict's name."""
        if isinstance(self.claim, sections.Question):
            return VERDICTS | ANSWERS
        if self.claim.margin:
            return VERDICTS | {"holds": self.claim.better.replace("_", " ")}
        return VERDICTS

    @property
    def verdict(self) -> str:
        """The printed text of the verdict; "not run yet" without numbers."""
        verdict = self.entry.get("verdict", "not run yet")
        return self.words.get(verdict, verdict)

    @property
    def verdict_holm(self) -> str:
        """The printed text of the verdict, after Holm's correction if there is one."""
        verdict = self.entry.get("verdict_holm")
        if verdict:
            return self.words.get(verdict, verdict)
        return self.verdict


def evaluate_results(rounds: Iterable[Round]) -> tuple[Studies, list[Answer]]:
    """Return round → result, and all answers, with Holm's correction per paper over all rounds."""
    studies: dict[str, Mapping[str, Any]] = {}
    answers: list[Answer] = []
    for study in rounds:
        compared = read_comparison(study.results) if study.results.exists() else {}
        studies[study.name] = compared
        answers += _answers_of_round(study, compared)
    ps = [answer.entry.get("p") for answer in answers]
    for place, p in enumerate(
        evaluation.correct_by_paper([answer.claim for answer in answers], ps)
    ):
        if entry := answers[place].entry:
            corrected = entry | {"verdict_holm": evaluation.verdict_after_holm(entry["verdict"], p)}
            answers[place] = answers[place]._replace(entry=corrected)
    return studies, answers


def _answers_of_round(study: Round, compared: Mapping[str, Any]) -> Iterator[Answer]:
    composed = study.compose()
    declared = extract_declared_settings(DeclaredClaims, composed.document)
    entries = compared.get("claims", {}) | compared.get("questions", {})
    entries = {
        name: entry
        for name, entry in entries.items()
        if entry.keys() >= {"asked", "form"}  # older versions wrote less
        and ("interval" not in entry["difference"] or "variances" in entry["difference"])
    }
    measured = {sections.compared_quantity_key(entry["asked"]): entry for entry in entries.values()}
    asked_before = result_evidence.forms_asked_before(entries, compared.get("asked") or {})
    state = "not run yet with this claim" if compared else "not run yet"
    for claim in (*declared.claims, *declared.questions):
        entry = measured.get(sections.compared_quantity_key(claim.model_dump()))
        entry = entry or result_evidence.compare_kept_items(study.results, compared, claim)
        data = composed.document.data
        changed = sections.has_changed_settings(entry.get("settings"), data, claim)
        good = ""
        if entry and claim.better == "no_worse":
            settings = read_study(composed.document)
            metrics = expected_metrics(settings, composed.all_stages, claim.phase)
            good = metrics[claim.metric].better
        if entry:
            entry = judge_again(entry, claim, good)
            entry["late"] = result_evidence.verdict_key(claim.model_dump()) not in asked_before
        yield Answer(study.name, study.command, claim, entry, state, changed, good)


def judge_again(
    entry: Mapping[str, Any], claim: sections.Claim | sections.Question, good: str = ""
) -> dict[str, Any]:
    """Return the stored numbers of a comparison with the uncorrected verdict on ``claim``."""
    # entry: the numbers in compare.json; good: whether "higher" or "lower" is better, for no_worse.
    difference = evaluation.difference_from_json(entry)
    verdict = evaluation.judge_difference(difference, claim, good)
    p = evaluation.p_of(difference, claim, good)
    keys = ("method", "against", "form", "settings")
    measured = {key: entry[key] for key in keys if key in entry}
    judged = evaluation.verdict_to_json(difference, entry["form"], verdict, p, None)
    return measured | judged | {"asked": claim.model_dump(mode="json", exclude_none=True)}


def count_facts_once(claims: Sequence[Answer]) -> list[Answer]:
    """Return the claims without those that repeat another study's quotation and effect."""
    studies: dict[tuple[Any, ...], str] = {}
    for answer in sorted(claims, key=lambda answer: not answer.entry):
        studies.setdefault(_fact_key(answer.claim), answer.study)
    return [answer for answer in claims if studies[_fact_key(answer.claim)] == answer.study]


def _fact_key(claim: sections.Claim | sections.Question) -> tuple[Any, ...]:
    assert isinstance(claim, sections.Claim), "a question is no fact of a paper"
    return claim.paper, claim.source, claim.quote, claim.metric, claim.better, claim.effect


class RequiredSampleSizes(NamedTuple):
    """The smallest number of seeds that suffices with the items as they are, and vice versa."""

    seeds: int | None  # None: no number up to MOST_SEEDS
    items: int | None  # None: no number up to MOST_ITEMS, or the metric has no items
    seeds_of_more_items: int | None  # with MORE_ITEMS times the items


def needed_sample(
    difference: Difference, comparison: sections.Comparison, good: str, tests: int = 1
) -> RequiredSampleSizes:
    """Return the sample that decides with 80 % power if the measured difference is the true one."""
    # good: whether "higher" or "lower" is better for the metric. tests: the level is 5 % / tests,
    # which suffices for Holm's correction over ``tests`` claims whatever the others find.
    gap, level = evaluation.verdict_gap_and_level(difference, comparison, good)
    level = 1 - (1 - level) / tests

    def decides(seeds: int, items: int) -> bool:
        planned = _with_sample(difference, seeds, items)
        reach = planned.half(level)
        more = planned.half(2 * POWER - 1)
        return reach is not None and more is not None and reach + more <= abs(gap)

    seeds, items = difference.seeds, difference.items
    numbers = range(seeds, MOST_SEEDS + 1) if seeds > 1 else ()
    enough, fewer = (
        next((number for number in numbers if decides(number, item_count)), None)
        for item_count in (items, MORE_ITEMS * items)
    )
    if not items or not decides(seeds, MOST_ITEMS):
        return RequiredSampleSizes(enough, None, fewer)
    low, high = items - 1, MOST_ITEMS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if decides(seeds, middle):
            high = middle
        else:
            low = middle
    return RequiredSampleSizes(enough, high, fewer)


def describe_open_answers(answers: Sequence[Answer], studies: Studies) -> list[str]:
    """Return a line per open claim or question: its difference and the sample that it needs."""
    claims = [answer for answer in answers if isinstance(answer.claim, sections.Claim)]
    families = Counter(answer.claim.paper for answer in claims if "p" in answer.entry)
    lines = []
    for answer in answers:
        if not answer.entry:
            lines.append(((2, 0.0), f"{_describe_comparison(answer)}: {answer.state}"))
        elif (answer.entry.get("verdict_holm") or answer.entry["verdict"]) == "open":
            tests = families[answer.claim.paper]
            lines.append(_describe_plan(answer, studies[answer.study], tests))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _describe_plan(
    answer: Answer, compared: Mapping[str, Any], tests: int
) -> tuple[tuple[int, float], str]:
    """Return sort key and line of an open answer; tests: number of tested claims of its paper."""
    difference = evaluation.difference_from_json(answer.entry)
    row = build_claim_row(answer.entry)
    if not difference.sources:
        return (1, 0.0), f"{_describe_comparison(answer)}: {row.difference}: {row.over}"
    # Training per seed: both methods, all phases up to the asked one.
    phases = PHASES[: PHASES.index(answer.claim.phase) + 1]
    methods = dict.fromkeys((answer.claim.method, answer.claim.against))
    cells = [compared[name].get(phase, {}).get("seconds") for name in methods for phase in phases]
    minutes = sum(cell["mean"] for cell in cells if cell) / 60
    ways = []
    sample = needed_sample(difference, answer.claim, answer.good)
    if answer.entry["verdict"] == "open":
        ways.append(_describe_ways(difference, sample, minutes))
    if isinstance(answer.claim, sections.Claim) and tests > 1:
        sample = needed_sample(difference, answer.claim, answer.good, tests)
        way = _describe_ways(difference, sample, minutes)
        ways.append(f"with Holm's correction over {tests} claims: {way}")
    order = math.inf
    if sample.seeds is not None:
        order = (sample.seeds - difference.seeds) * minutes
    measured = f"{row.difference} [{row.difference_limits}]"
    return (0, order), f"{_describe_comparison(answer)}: {measured}: {'; '.join(ways)}"


def _describe_comparison(answer: Answer) -> str:
    claim = answer.claim
    place = ", ".join(filter(None, (claim.paper, answer.source or "question", claim.phase)))
    return f"{answer.study}: {place}: {claim.words}"


def _with_sample(difference: Difference, seeds: int, items: int) -> Difference:
    """Return the difference with its variances scaled to this number of seeds and of items."""
    # A = var(seed means)/S scales with 1/S, B = var(item means)/n with 1/n.
    numbers = [(difference.seeds, seeds), (difference.items, items)]
    if len(difference.sources) == 1:
        numbers = numbers[:1] if difference.kind == SEEDS else numbers[1:]
    sources = tuple(
        VarianceSource(source.variance * now / then, then - 1)
        for source, (now, then) in zip(difference.sources, numbers, strict=True)
    )
    return difference._replace(sources=sources, seeds=seeds, items=items)


def _describe_ways(difference: Difference, sample: RequiredSampleSizes, minutes: float) -> str:
    """Return the sufficient seeds or items as text; minutes: training time per seed."""
    ways = []
    if sample.seeds is not None:
        more = sample.seeds - difference.seeds
        ways.append(f"{sample.seeds} seeds ({more} more, {more * minutes:.0f} min of training)")
    if sample.items is not None:
        ways.append(f"{sample.items:,} items instead of {difference.items:,}")
    if not ways and sample.seeds_of_more_items is not None:
        items = f"{MORE_ITEMS * difference.items:,} items instead of {difference.items:,}"
        ways.append(f"{sample.seeds_of_more_items} seeds with {items}")
    return " or ".join(ways) or f"no number of seeds up to {MOST_SEEDS}"
