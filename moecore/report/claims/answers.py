"""The answers of all studies to claims and questions, and the sample that makes them precise.

Stored results are judged by the claims as they are now, with Holm's correction over all studies.
Sample sizes follow from the papers' effects and measured variances, never from a measured
difference: docs/methods.md, Statistics.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.core.config import Config
from moecore.report.claims import evaluation, result_evidence
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.tables.cells import NumberFormat
from moecore.report.tables.metrics_by_method import expected_metrics, read_comparison
from moecore.statistics.comparisons import SEEDS, Difference, VarianceSource
from moecore.study import sections
from moecore.study.questions import Round
from moecore.study.settings import extract_settings
from moecore.study.stages import PHASES
from moecore.study.study import read_study

VERDICTS = {"open": "not significant"}  # verdict → its text, if that is not its name
Asked = sections.Claim | sections.Question
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
    claim: Asked
    entry: dict[str, Any]  # of compare.json; {} if it has none
    state: str  # why there is no entry: "not run yet"
    changed: bool  # whether settings changed after the run
    good: str = ""  # for no_worse: whether "higher" or "lower" is better for the metric

    @property
    def source(self) -> str:
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
        verdict = self.entry.get("verdict", "not run yet")
        return self.words.get(verdict, verdict)

    @property
    def verdict_holm(self) -> str:
        """The printed text of the verdict, after Holm's correction if there is one."""
        verdict = self.entry.get("verdict_holm") or self.entry.get("verdict", "not run yet")
        return self.words.get(verdict, verdict)


def evaluate_results(rounds: Iterable[Round]) -> tuple[Studies, list[Answer]]:
    """Return round → result, and all answers, with Holm's correction per paper over all rounds."""
    studies, answers = collect_answers(rounds)
    return studies, correct_over_papers(answers)


def collect_answers(rounds: Iterable[Round]) -> tuple[Studies, list[Answer]]:
    studies: dict[str, Mapping[str, Any]] = {}
    answers: list[Answer] = []
    for study in rounds:
        compared = read_comparison(study.results) if study.results.exists() else {}
        studies[study.name] = compared
        answers += _answers_of_round(study, compared)
    return studies, answers


def correct_over_papers(answers: list[Answer]) -> list[Answer]:
    """Return the answers with verdicts after Holm's correction over the claims of each paper."""
    ps = [answer.entry.get("p") for answer in answers]
    corrected = evaluation.correct_by_paper([answer.claim for answer in answers], ps)
    for place, p in enumerate(corrected):
        if entry := answers[place].entry:
            holm = {"p_holm": p, "verdict_holm": evaluation.verdict_after_holm(entry["verdict"], p)}
            answers[place] = answers[place]._replace(entry=entry | holm)
    return answers


def _answers_of_round(study: Round, compared: Mapping[str, Any]) -> Iterator[Answer]:
    composed = study.compose()
    declared = extract_settings(DeclaredClaims, composed.document)
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
        changed = sections.settings_changed(entry.get("settings"), data, claim)
        good = ""
        if entry and claim.better == "no_worse":
            settings = read_study(composed.document)
            good = expected_metrics(settings, composed.all_stages, claim.phase)[claim.metric].better
        if entry:
            entry = judge_again(entry, claim, good)
            entry["late"] = result_evidence.verdict_key(claim.model_dump()) not in asked_before
        yield Answer(study.name, study.command, claim, entry, state, changed, good)


def judge_again(entry: Mapping[str, Any], claim: Asked, good: str = "") -> dict[str, Any]:
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


def _fact_key(claim: Asked) -> tuple[Any, ...]:
    assert isinstance(claim, sections.Claim), "a question is no fact of a paper"
    return claim.paper, claim.source, claim.quote, claim.metric, claim.better, claim.effect


class RequiredSampleSizes(NamedTuple):
    """The smallest number of seeds that suffices with the items as they are, and vice versa."""

    seeds: int | None  # None: no number up to MOST_SEEDS
    items: int | None  # None: no number up to MOST_ITEMS, or the metric has no items
    seeds_of_more_items: int | None  # with MORE_ITEMS times the items


def needed_sample(difference: Difference, effect: float) -> RequiredSampleSizes:
    """Return the sample whose 95 % interval reaches at most half of ``effect`` to each side."""
    # effect: what the paper prints. Of the difference only the variances are used, not the value.

    def is_precise(seeds: int, items: int) -> bool:
        half = _with_sample(difference, seeds, items).half_width()
        return half is not None and half <= abs(effect) / 2

    seeds, items = difference.seeds, difference.items
    numbers = range(seeds, MOST_SEEDS + 1) if seeds > 1 else ()
    enough, fewer = (
        next((number for number in numbers if is_precise(number, item_count)), None)
        for item_count in (items, MORE_ITEMS * items)
    )
    if not items or not is_precise(seeds, MOST_ITEMS):
        return RequiredSampleSizes(enough, None, fewer)
    low, high = items - 1, MOST_ITEMS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if is_precise(seeds, middle):
            high = middle
        else:
            low = middle
    return RequiredSampleSizes(enough, high, fewer)


def describe_plans(answers: Sequence[Answer], studies: Studies) -> list[str]:
    """Return a line per table of a paper: whether its claims are precise, or what they need."""
    # Then a line per claim that was not run, or of which the paper prints no effect.
    tables = defaultdict(list)  # (paper, source) → claims with the paper's effect
    others = []
    for answer in answers:
        line = f"{_describe_comparison(answer)}: "
        if not answer.entry:
            others.append(line + answer.state)
        elif isinstance(answer.claim, sections.Claim):
            effect = answer.claim.effect or answer.claim.reference_effect
            if not answer.entry["difference"].get("interval"):
                others.append(line + build_claim_row(answer.entry).over)
            elif effect is None:
                others.append(line + "the paper prints no effect")
            else:
                tables[answer.claim.paper, answer.source].append((answer, abs(effect)))
    lines = [_describe_table(", ".join(place), claims, studies) for place, claims in tables.items()]
    return [line for _, line in sorted(lines)] + others


def _describe_comparison(answer: Answer) -> str:
    claim = answer.claim
    place = ", ".join(filter(None, (claim.paper, answer.source or "question", claim.phase)))
    return f"{answer.study}: {place}: {claim.words}"


def _describe_table(
    place: str, claims: Sequence[tuple[Answer, float]], studies: Studies
) -> tuple[float, str]:
    """Return minutes of training and the line of a table; minutes are infinite without a plan."""
    # claims: those of the table, each with the effect that the paper prints.
    samples = []
    widths = []  # half-width in halves of the effect, and as text
    for answer, effect in claims:
        difference = evaluation.difference_from_json(answer.entry)
        samples.append(needed_sample(difference, effect))
        half = difference.half_width() or 0.0
        shown = NumberFormat(answer.entry["form"])
        text = f"±{shown.size(half)} where half of the paper's effect is {shown.size(effect / 2)}"
        widths.append((2 * half / effect, f"{text} ({answer.claim.words})"))
    widest, text = max(widths)
    line = f"{place}: {text}"
    if widest <= 1:
        return 0.0, f"{line}: precise enough"
    ways = []
    minutes = math.inf
    seeds = [sample.seeds or math.inf for sample in samples]
    if max(seeds) <= MOST_SEEDS:
        minutes = _minutes_of_training([answer for answer, _ in claims], int(max(seeds)), studies)
        ways.append(f"{max(seeds)} seeds ({minutes:.0f} min of training)")
    items = [sample.items or math.inf for sample in samples]
    if max(items) <= MOST_ITEMS:
        ways.append(f"{max(items):,} items")
    fewer = [sample.seeds_of_more_items or math.inf for sample in samples]
    if not ways and max(fewer) <= MOST_SEEDS:
        ways.append(f"{max(fewer)} seeds with {MORE_ITEMS} times the items")
    return minutes, f"{line}: {' or '.join(ways) or f'no number of seeds up to {MOST_SEEDS}'}"


def _minutes_of_training(claims: Sequence[Answer], seeds: int, studies: Studies) -> float:
    """Return the training time of a table's models, each method once, up to this many seeds."""
    minutes: dict[tuple[str, str, str], float] = {}
    for answer in claims:
        missing = seeds - answer.entry["difference"]["seeds"]
        for phase in PHASES[: PHASES.index(answer.claim.phase) + 1]:
            for method in (answer.claim.method, answer.claim.against):
                cell = studies[answer.study][method].get(phase, {}).get("seconds")
                if cell:
                    minutes[answer.study, method, phase] = missing * cell["mean"] / 60
    return sum(minutes.values())


def _with_sample(difference: Difference, seeds: int, items: int) -> Difference:
    # A = var(seed means)/S scales with 1/S, B = var(item means)/n with 1/n.
    numbers = [(difference.seeds, seeds), (difference.items, items)]
    if len(difference.sources) == 1:
        numbers = numbers[:1] if difference.kind == SEEDS else numbers[1:]
    sources = tuple(
        VarianceSource(source.variance * now / then, source.freedom + then - now)
        for source, (now, then) in zip(difference.sources, numbers, strict=True)
    )
    return difference._replace(sources=sources, seeds=seeds, items=items)
