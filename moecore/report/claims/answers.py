"""Stored answers of all studies to claims and questions, and the sample sizes that claims need.

Stored results are judged by the claims as they are now, with Holm's correction over all studies.
Sample sizes follow from the papers' effects and measured variances, never from a measured
difference: docs/methods.md, Statistics.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.core.config import Config
from moecore.report.claims import claims_table, evaluation, items_and_dates
from moecore.report.tables.cells import NumberFormat
from moecore.report.tables.metrics_by_method import check_compare_json_form, expected_metrics
from moecore.statistics.comparisons import OVER_SEEDS, Difference, SourceVariance
from moecore.study import params_reader, run_and_claims, stages
from moecore.study.questions import QuestionRound
from moecore.study.study import read_study

VERDICT_TEXTS = {"open": "not significant"}  # verdict → its text, if that is not its name
Asked = run_and_claims.Claim | run_and_claims.Question
Studies = Mapping[str, Mapping[str, Any]]  # round of a question → result, {} if it was not run
MAX_SEEDS = 100
MAX_REQUIRED_ITEMS = 10_000_000
MORE_ITEMS_FACTOR = 10  # factor of ``seeds_of_more_items``


class DeclaredClaims(Config):
    """The sections of a params.yaml that define its claims and questions, and what is run."""

    run: run_and_claims.RunSelection
    claims: tuple[run_and_claims.Claim, ...] = ()
    questions: tuple[run_and_claims.Question, ...] = ()


class Answer(NamedTuple):
    """A claim or question of one round (one run of a question), with its numbers if it was run."""

    study: str
    command: str  # that runs the round
    claim: Asked
    entry: dict[str, Any]  # of compare.json; {} if it has none
    state: str  # why there is no entry: "not run yet"
    changed: bool  # whether settings changed after the run
    good: str = ""  # for no_worse: whether "higher" or "lower" is better for the metric

    @property
    def source(self) -> str:
        return self.claim.source if isinstance(self.claim, run_and_claims.Claim) else ""

    @property
    def verdict_texts(self) -> Mapping[str, str]:
        """Verdict → text to print, where that differs from the verdict's name."""
        if isinstance(self.claim, run_and_claims.Question):
            return VERDICT_TEXTS | claims_table.ANSWERS
        if self.claim.margin:
            return VERDICT_TEXTS | {"holds": self.claim.better.replace("_", " ")}
        return VERDICT_TEXTS

    @property
    def verdict(self) -> str:
        verdict = self.entry.get("verdict", "not run yet")
        return self.verdict_texts.get(verdict, verdict)

    @property
    def verdict_holm(self) -> str:
        """The verdict as printed: with Holm's correction if stored, else without."""
        verdict = self.entry.get("verdict_holm") or self.entry.get("verdict", "not run yet")
        return self.verdict_texts.get(verdict, verdict)


def collect_corrected_answers(rounds: Iterable[QuestionRound]) -> tuple[Studies, list[Answer]]:
    """Return round → compare.json, and all answers with Holm's correction per paper."""
    studies, answers = collect_answers(rounds)
    return studies, apply_holm_per_paper(answers)


def collect_answers(rounds: Iterable[QuestionRound]) -> tuple[Studies, list[Answer]]:
    studies: dict[str, Mapping[str, Any]] = {}
    answers: list[Answer] = []
    for study in rounds:
        compared = check_compare_json_form(study.question.results_path, study.read_numbers())
        studies[study.name] = compared
        answers += _answers_of_round(study, compared)
    return studies, answers


def apply_holm_per_paper(answers: list[Answer]) -> list[Answer]:
    ps = [answer.entry.get("p") for answer in answers]
    corrected = evaluation.holm_by_paper([answer.claim for answer in answers], ps)
    for place, p in enumerate(corrected):
        if entry := answers[place].entry:
            holm = {"p_holm": p, "verdict_holm": evaluation.verdict_after_holm(entry["verdict"], p)}
            answers[place] = answers[place]._replace(entry=entry | holm)
    return answers


def _answers_of_round(study: QuestionRound, compared: Mapping[str, Any]) -> Iterator[Answer]:
    composed = study.compose()
    declared = params_reader.extract_settings(DeclaredClaims, composed.document)
    entries = compared.get("claims", {}) | compared.get("questions", {})
    entries = {
        name: entry
        for name, entry in entries.items()
        if entry.keys() >= {"asked", "form"}  # older versions wrote less
        and ("interval" not in entry["difference"] or "variances" in entry["difference"])
    }
    measured = {
        run_and_claims.compared_quantity_key(entry["asked"]): entry for entry in entries.values()
    }
    asked_before = items_and_dates.keys_asked_before(entries, compared.get("asked") or {})
    state = "not run yet with this claim" if compared else "not run yet"
    for claim in (*declared.claims, *declared.questions):
        entry = measured.get(run_and_claims.compared_quantity_key(claim.model_dump()))
        entry = entry or items_and_dates.compute_claim_from_items(study, compared, claim)
        data = composed.document.data
        changed = run_and_claims.have_settings_changed(entry.get("settings"), data, claim)
        good = ""
        if entry and claim.better == "no_worse":
            settings = read_study(composed.document)
            good = expected_metrics(settings, composed.all_stages, claim.phase)[claim.metric].better
        if entry:
            entry = reevaluate_claim(entry, claim, good)
            entry["late"] = items_and_dates.verdict_key(claim.model_dump()) not in asked_before
        yield Answer(study.name, study.command, claim, entry, state, changed, good)


def reevaluate_claim(entry: Mapping[str, Any], claim: Asked, good: str = "") -> dict[str, Any]:
    """Return stored numbers with a new verdict by ``claim``; ``good``: the better direction."""
    # entry: the numbers in compare.json; good: whether "higher" or "lower" is better, for no_worse.
    difference = evaluation.difference_from_json(entry)
    verdict = evaluation.verdict_on_difference(difference, claim, good)
    p = evaluation.verdict_p_value(difference, claim, good)
    keys = ("method", "against", "form", "settings")
    measured = {key: entry[key] for key in keys if key in entry}
    judged = evaluation.verdict_to_json(difference, entry["form"], verdict, p, None)
    return measured | judged | {"asked": claim.model_dump(mode="json", exclude_none=True)}


class RequiredSampleSizes(NamedTuple):
    """Seeds, or items, for a 95 % interval of ± half the effect; the other number is unchanged."""

    seeds: int | None  # None: no number up to MAX_SEEDS
    items: int | None  # None: no number up to MAX_REQUIRED_ITEMS, or the metric has no items
    seeds_of_more_items: int | None  # seeds needed with MORE_ITEMS_FACTOR times the items


def compute_required_samples(difference: Difference, effect: float) -> RequiredSampleSizes:
    """Return the sample sizes at which the 95 % interval is at most ± ``effect`` / 2."""
    # effect: as printed in the paper. Only the variances of ``difference`` are used, not its value.

    def is_precise(seeds: int, items: int) -> bool:
        half = _difference_at_sample_size(difference, seeds, items).half_width()
        return half is not None and half <= abs(effect) / 2

    seeds, items = difference.seeds, difference.items
    numbers = range(seeds, MAX_SEEDS + 1) if seeds > 1 else ()
    enough, fewer = (
        next((number for number in numbers if is_precise(number, item_count)), None)
        for item_count in (items, MORE_ITEMS_FACTOR * items)
    )
    if not items or not is_precise(seeds, MAX_REQUIRED_ITEMS):
        return RequiredSampleSizes(enough, None, fewer)
    low, high = items - 1, MAX_REQUIRED_ITEMS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if is_precise(seeds, middle):
            high = middle
        else:
            low = middle
    return RequiredSampleSizes(enough, high, fewer)


def describe_required_samples(answers: Sequence[Answer], studies: Studies) -> list[str]:
    """Return a line per table of a paper: "precise enough", or the seeds or items that it needs."""
    # Followed by a line per claim that was not run or has no interval or printed effect.
    tables = defaultdict(list)  # (paper, source) → claims with the paper's effect
    others = []
    for answer in answers:
        line = f"{_describe_comparison(answer)}: "
        if not answer.entry:
            others.append(line + answer.state)
        elif isinstance(answer.claim, run_and_claims.Claim):
            effect = answer.claim.effect or answer.claim.reference_effect
            if not answer.entry["difference"].get("interval"):
                others.append(line + claims_table.build_claim_row(answer.entry).over)
            elif effect is None:
                others.append(line + "the paper prints no effect")
            else:
                tables[answer.claim.paper, answer.source].append((answer, abs(effect)))
    lines = [_describe_samples_of_table(key, rows, studies) for key, rows in tables.items()]
    return [line for _, line in sorted(lines)] + others


def _describe_comparison(answer: Answer) -> str:
    claim = answer.claim
    place = ", ".join(filter(None, (claim.paper, answer.source or "question", claim.phase)))
    return f"{answer.study}: {place}: {claim.words}"


def _describe_samples_of_table(
    key: tuple[str, str], claims: Sequence[tuple[Answer, float]], studies: Studies
) -> tuple[float, str]:
    """Return minutes of training until a table is precise enough (inf: unknown), and text on it."""
    # key: (paper, source); claims: (answer, effect printed in the paper) of the table.
    samples = []
    widths = []  # (half-width / half of the effect, its text)
    for answer, effect in claims:
        difference = evaluation.difference_from_json(answer.entry)
        samples.append(compute_required_samples(difference, effect))
        half = difference.half_width() or 0.0
        shown = NumberFormat(answer.entry["form"])
        text, goal = (shown.magnitude(width) for width in (half, effect / 2))
        text = f"±{text} where half of the paper's effect is {goal} ({answer.claim.words})"
        widths.append((2 * half / effect, text))
    widest, text = max(widths)
    line = f"{', '.join(key)}: {text}"
    if widest <= 1:
        return 0.0, f"{line}: precise enough"
    ways = []
    minutes = math.inf
    seeds = [sample.seeds or math.inf for sample in samples]
    if max(seeds) <= MAX_SEEDS:
        minutes = _minutes_for_seeds([answer for answer, _ in claims], int(max(seeds)), studies)
        ways.append(f"{max(seeds)} seeds ({minutes:.0f} min of training)")
    items = [sample.items or math.inf for sample in samples]
    if max(items) <= MAX_REQUIRED_ITEMS:
        ways.append(f"{max(items):,} items")
    fewer = [sample.seeds_of_more_items or math.inf for sample in samples]
    if not ways and max(fewer) <= MAX_SEEDS:
        ways.append(f"{max(fewer)} seeds with {MORE_ITEMS_FACTOR} times the items")
    return (minutes, f"{line}: {' or '.join(ways) or f'no number of seeds up to {MAX_SEEDS}'}")


def _minutes_for_seeds(claims: Sequence[Answer], seeds: int, studies: Studies) -> float:
    minutes: dict[tuple[str, str, str], float] = {}
    for answer in claims:
        missing = seeds - answer.entry["difference"]["seeds"]
        for phase in stages.PHASES[: stages.PHASES.index(answer.claim.phase) + 1]:
            for method in (answer.claim.method, answer.claim.against):
                cell = studies[answer.study][method].get(phase, {}).get("seconds")
                if cell:
                    minutes[answer.study, method, phase] = missing * cell["mean"] / 60
    return sum(minutes.values())


def _difference_at_sample_size(difference: Difference, seeds: int, items: int) -> Difference:
    # A = var(seed means)/S scales with 1/S, B = var(item means)/n with 1/n.
    numbers = [(difference.seeds, seeds), (difference.items, items)]
    if len(difference.sources) == 1:
        numbers = numbers[:1] if difference.kind == OVER_SEEDS else numbers[1:]
    sources = tuple(
        SourceVariance(source.variance * now / then, source.freedom + then - now)
        for source, (now, then) in zip(difference.sources, numbers, strict=True)
    )
    return difference._replace(sources=sources, seeds=seeds, items=items)
