"""docs/claims.md: every table and figure of the papers beside what the studies found of it.

Joins paper_tables.yaml with the claims and questions of pipelines/ and the numbers in
pipelines/results/. A study is one round of a question; those that were not run are said to be so.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import write_whole
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.claims.evaluation import correct_by_paper, verdict_after_holm
from moecore.report.claims.stored_verdicts import judge_again
from moecore.report.measures.sizes import COUNTS, format_size
from moecore.report.page.templating import template_environment
from moecore.report.tables.cells import interval_from_json, markdown_table
from moecore.report.tables.metrics_by_method import expected_metrics, read_comparison
from moecore.report.tables.number_format import NumberFormat
from moecore.study.document import load_yaml_document
from moecore.study.questions import Round, load_questions
from moecore.study.sections import (
    Claim,
    Question,
    Selection,
    compared_quantity_key,
    has_changed_settings,
)
from moecore.study.settings import extract_declared_settings
from moecore.study.study import read_study

TABLES = Path(__file__).parents[1] / "paper_tables.yaml"
TARGET = Path("docs/claims.md")
VERDICTS = {"open": "not significant"}  # how a verdict is printed, if not by its name
ORDER = ("holds", "equivalent", "no worse", VERDICTS["open"], "differs", "not run yet")
HEAD = ("where", "shows", "the paper", "here", "difference", "verdict", "study")
Studies = Mapping[str, Mapping[str, Any]]  # round of a question → result, {} where it was not run
SIZES = "ours/sizes"
STATES = {
    "judged": "judged by a claim",
    "printed": "printed beside the paper's, without a claim",
    "computed": "computed beside the paper's: sizes, of which nothing is trained",
    "drawn": "drawn on a study's page",
    "not run yet": "in a study that was not run yet with these claims",
    "no study yet": "in no study yet",
    "cannot": "cannot be printed here (see there)",
    "scheme": "a scheme or settings: nothing to print",
}


class UnjudgedMetrics(Config):
    """Metrics of a study that stand beside a paper's number without being judged."""

    study: str
    phase: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]


class ModelSizeComparison(Config):
    """A model of ours/sizes, another that is held against it, and what of them is printed."""

    models: tuple[str, str]
    metrics: tuple[str, ...] = Field((), description="left out: all that the paper prints")


class PaperTableOrFigure(Config):
    """One table, figure or sentence of a paper."""

    number: str
    shows: str
    paper: str = Field("", description="the paper's own numbers")
    sources: tuple[str, ...] = Field((), description="sources of claims; left out: the number")
    columns: tuple[UnjudgedMetrics, ...] = ()
    sizes: tuple[ModelSizeComparison, ...] = ()
    drawn: tuple[str, ...] = Field((), description="studies whose page draws it")
    scheme: bool = False
    needs: str = Field("", description="why it cannot be printed here")

    def holds(self, paper: str, claim: Claim | Question) -> bool:
        """Return whether a claim stands in this row of a paper."""
        sources = self.sources or (self.number,)
        return isinstance(claim, Claim) and claim.paper == paper and claim.source in sources


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


def write_claims_page(root: Path = Path()) -> Path:
    """Write docs/claims.md below ``root``; raises UserError where a file is damaged."""
    target = root / TARGET
    write_whole(target, render_claims_page(root))
    return target


def render_claims_page(root: Path = Path()) -> str:
    """Return the text of docs/claims.md."""
    rounds = [one for question in load_questions(root) for one in question.rounds]
    commands = {one.name: one.command for one in rounds}
    studies, answers = evaluate_results(rounds)
    claims = [answer for answer in answers if isinstance(answer.claim, Claim)]
    states: Counter[str] = Counter()
    tables = {}
    others = claims
    for paper, rows in read_paper_tables().items():
        cells = []
        for row in rows:
            of_row = [answer for answer in claims if row.holds(paper, answer.claim)]
            others = [answer for answer in others if answer not in of_row]
            state, lines = paper_item_state_and_rows(row, of_row, studies, commands)
            states[state] += 1
            cells += lines
        tables[paper] = markdown_table(HEAD, cells)
    if others:
        cells = [
            [answer.claim.paper, answer.claim.source, *_answer_cells(answer)]
            for answer in others
            if isinstance(answer.claim, Claim)
        ]
        tables["Claims of other sources"] = markdown_table(("paper", "where", *HEAD[3:]), cells)
    asked = [answer for answer in answers if isinstance(answer.claim, Question)]
    if asked:
        head = ("question", "difference", "answer", "study")
        cells = [_answer_cells(answer) for answer in asked]
        tables["What no paper claims, asked of these runs"] = markdown_table(head, cells)
    facts = count_facts_once(claims)
    verdicts = Counter(answer.verdict_holm for answer in facts)
    template = template_environment().overlay(autoescape=False).get_template("claims.md.jinja")
    told = ", ".join(f"{verdicts[name]} {name}" for name in ORDER if verdicts[name])
    numbers = {
        "facts": facts,
        "told": told,
        "excluding": sum(bool(build_claim_row(one.entry).excludes) for one in facts if one.entry),
        "changed": sum(answer.changed for answer in facts),
        "changed_questions": sum(answer.changed for answer in asked),
        "states": states,
    }
    return template.render(numbers, words_of_states=STATES, tables=tables).rstrip() + "\n"


def read_paper_tables() -> dict[str, list[PaperTableOrFigure]]:
    """Return the rows of each paper, as paper_tables.yaml has them."""
    papers = load_yaml_document(str(TABLES)).data
    return {
        name: [PaperTableOrFigure.model_validate(row) for row in rows]
        for name, rows in papers.items()
    }


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
        compared_quantity_key(entry["asked"]): entry
        for entry in entries
        if entry.keys() >= {"asked", "form"}  # others are of older versions
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


def describe_unjudged_metrics(printed: UnjudgedMetrics, studies: Studies) -> str:
    """Return ``vmoe 55.0 %, prc 57.1 %`` of each metric that the study found; "" for none."""
    compared = studies.get(printed.study, {})
    words = []
    for metric in printed.metrics:
        cells = {}
        for method in printed.methods:
            if cell := compared.get(method, {}).get(printed.phase, {}).get(metric):
                cells[method] = cell
        if cells:
            form = next(iter(cells.values()))["form"]
            number_format = NumberFormat.of(form, map(interval_from_json, cells.values()))
            values = [f"{name} {number_format.value(one['mean'])}" for name, one in cells.items()]
            words.append(f"`{metric}`: {', '.join(values)}")
    return "; ".join(words)


def describe_model_size_ratios(asked: ModelSizeComparison, compared: Mapping[str, Any]) -> str:
    """Return ``A → B: Parameters, M: 285 → 243, 0.851 times (the paper: 0.853)``.

    compared: the entry ``sizes`` of that study's compare.json.
    """
    words = []
    for count in COUNTS:
        pair = [compared.get(name, {}).get(count.metric) for name in asked.models]
        if not all(pair) or (asked.metrics and count.metric not in asked.metrics):
            continue
        ours, theirs = (pair[1][whose] / pair[0][whose] for whose in ("ours", "paper"))
        there, here = (format_size(one["ours"], count) for one in pair)
        turn = "; the other way" if (ours - 1) * (theirs - 1) < 0 else ""
        ratios = f"{ours:.3g} times (the paper: {theirs:.3g}{turn})"
        words.append(f"{count.label}: {there} → {here}, {ratios}")
    return f"{' → '.join(asked.models)}: {'; '.join(words)}"


def paper_item_state_and_rows(
    row: PaperTableOrFigure,
    claims: Sequence[Answer],
    studies: Studies,
    commands: Mapping[str, str],
) -> tuple[str, list[list[str]]]:
    """Return what is known of a row, a key of STATES, and its lines.

    A line for each claim, else one for what is printed, drawn or absent.
    """
    values = [
        (one, words) for one in row.columns if (words := describe_unjudged_metrics(one, studies))
    ]
    sizes = studies.get(SIZES, {}).get("sizes", {})
    computed = [describe_model_size_ratios(asked, sizes) for asked in row.sizes if sizes]
    named = [*row.drawn, *(one.study for one in row.columns)]
    verdict = "–"
    if row.scheme:
        state = "scheme"
    elif row.needs:
        state = "cannot"
        verdict = f"needs {row.needs}"
    elif any(answer.entry for answer in claims):
        state = "judged"
    elif computed:
        state = "computed"
    elif values:
        state = "printed"
    elif any(studies.get(name) for name in row.drawn):
        state = "drawn"
        verdict = "drawn on the study's page"
    elif claims or named:
        state = verdict = "not run yet"
    else:
        state = verdict = "no study yet"
    here = ""
    if values:
        here = "; ".join(f"{printed.phase}, {words}" for printed, words in values)
        verdict = "no claim"
        named = [printed.study for printed, _ in values]
    start = [row.number, row.shows, row.paper or "–"]
    lines = [["″", "", "", *_answer_cells(answer)] for answer in claims]
    shown = "; ".join(f"`{commands.get(name, name)}`" for name in dict.fromkeys(named))
    lines += [["″", "", "", words, "", "computed", f"`{commands[SIZES]}`"] for words in computed]
    if lines:
        lines[0][:3] = start
    return state, lines or [[*start, here, "", verdict, shown]]


def _answer_cells(answer: Answer) -> list[str]:
    """Return here, difference, verdict, study."""
    claim = answer.claim
    said = claim.says if isinstance(claim, Claim) else claim.asks
    if isinstance(claim, Claim):
        said += f" (“{claim.quote}”)"
    command = f"`{answer.command}`"
    if not answer.entry:
        return [said, "", answer.state, command]
    row = build_claim_row(answer.entry)
    other = claim.against_metric and f"`{claim.against_metric}` "
    here = f"{said}: `{claim.metric}` {claim.method} {row.values[0]}, "
    here += f"{other}{claim.against} {row.values[1]}"
    difference = f"{row.difference}, {row.over}"
    if limits := row.difference_limits:
        difference = f"{row.difference} [{limits}], over {row.over} ({row.counts})"
    if row.effect:
        difference += f"; the paper: {row.effect}"
    verdict = answer.verdict
    if row.detectable:
        verdict += f" ({row.detectable})"
    if holm := row.holm_note(answer.words):
        verdict += f"; {holm}"
    if row.excludes:
        verdict += f"; {row.excludes}"
    if answer.changed:
        verdict += " ‡"
    return [here, difference, verdict, command]
