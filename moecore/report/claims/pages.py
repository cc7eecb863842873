"""Pages in Markdown from the papers, the questions of pipelines/ and pipelines/results/.

docs/claims.md: every table and figure of the papers, with what the studies found.
pipelines/README.md: the questions of each folder, with answers and commands. README.md of a folder:
tables of claims and questions, between ``<!-- answers: tgr/table_3 -->`` and ``<!-- end -->``.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError, write_whole
from moecore.measure.sizes import METRICS
from moecore.report.claims.answers import Answer, Studies, count_facts_once, evaluate_results
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.page.report_page import template_environment
from moecore.report.pictures.sizes import format_size
from moecore.report.tables.cells import SCALES, NumberFormat, interval_from_json, markdown_table
from moecore.study.document import did_you_mean
from moecore.study.papers import (
    PIPELINES,
    ModelSizeComparison,
    PaperTable,
    UnjudgedMetrics,
    load_papers,
)
from moecore.study.questions import WORLDS, QuestionFile, load_questions, load_rounds
from moecore.study.sections import Claim, Question

CLAIMS_PAGE = Path("docs/claims.md")
STUDIES_PAGE = PIPELINES / "README.md"
ORDER = ("holds", "equivalent", "no worse", "not significant", "differs", "not run yet")
MARKED = re.compile(
    r"(?P<start><!-- answers: (?P<study>\S+) -->)\n.*?(?P<end><!-- end -->)", re.DOTALL
)
NUMBER = re.compile(
    r"\{(?P<metric>[^\s{}]+) (?P<method>\w+)(?: - (?:(?P<other>[^\s{}]+) )?(?P<against>\w+))?"
    r"(?: @(?P<phase>\w+))?(?: of (?P<study>[\w/.]+))?(?::(?P<digits>\.\df))?\}"
)
SAID = {"not significant": "open"}  # texts of a question's verdict
HEAD = ("where", "shows", "the paper", "here", "difference", "verdict", "study")
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


def write_claims_page(root: Path = Path()) -> Path:
    """Write docs/claims.md below ``root``; raises UserError where a file is damaged."""
    target = root / CLAIMS_PAGE
    write_whole(target, render_claims_page(root))
    return target


def render_claims_page(root: Path = Path()) -> str:
    """Return the text of docs/claims.md."""
    rounds = load_rounds(root)
    commands = {study.name: study.command for study in rounds}
    studies, answers = evaluate_results(rounds)
    claims = [answer for answer in answers if isinstance(answer.claim, Claim)]
    states: Counter[str] = Counter()
    tables = {}
    unlisted = claims
    for paper in load_papers(root).values():
        cells = []
        for row in paper.tables:
            of_row = [answer for answer in claims if _stands_in(row, paper.name, answer.claim)]
            unlisted = [answer for answer in unlisted if answer not in of_row]
            state, lines = paper_item_state_and_rows(row, of_row, studies, commands)
            states[state] += 1
            cells += lines
        tables[paper.name] = markdown_table(HEAD, cells)
    if unlisted:
        cells = [
            [answer.claim.paper, answer.claim.source, *_answer_cells(answer)]
            for answer in unlisted
            if isinstance(answer.claim, Claim)
        ]
        tables["Claims of other sources"] = markdown_table(("paper", "where", *HEAD[3:]), cells)
    questions = [answer for answer in answers if isinstance(answer.claim, Question)]
    if questions:
        head = ("question", "difference", "answer", "study")
        cells = [_answer_cells(answer) for answer in questions]
        tables["What no paper claims, asked of these runs"] = markdown_table(head, cells)
    facts = count_facts_once(claims)
    verdicts = Counter(answer.verdict_holm for answer in facts)
    template = template_environment().overlay(autoescape=False).get_template("claims.md.jinja")
    told = ", ".join(f"{verdicts[name]} {name}" for name in ORDER if verdicts[name])
    numbers = {
        "facts": facts,
        "told": told,
        "excluding": sum(
            bool(build_claim_row(answer.entry).excludes) for answer in facts if answer.entry
        ),
        "changed": sum(answer.changed for answer in facts),
        "changed_questions": sum(answer.changed for answer in questions),
        "states": states,
    }
    return template.render(numbers, words_of_states=STATES, tables=tables).rstrip() + "\n"


def _stands_in(row: PaperTable, paper: str, claim: Claim | Question) -> bool:
    sources = {
        row.number,
        *(claimed["source"] for claimed in row.claims.values() if "source" in claimed),
    }
    return isinstance(claim, Claim) and claim.paper == paper and claim.source in sources


def describe_unjudged_metrics(printed: UnjudgedMetrics, studies: Studies) -> str:
    """Return ``vmoe 55.0 %, prc 57.1 %`` for each metric that the study measured."""
    compared = studies.get(printed.study, {})
    texts = []
    for metric in printed.metrics:
        cells = {}
        for method in printed.methods:
            if cell := compared.get(method, {}).get(printed.phase, {}).get(metric):
                cells[method] = cell
        if cells:
            form = next(iter(cells.values()))["form"]
            number_format = NumberFormat.of(form, map(interval_from_json, cells.values()))
            values = [f"{name} {number_format.value(cell['mean'])}" for name, cell in cells.items()]
            texts.append(f"`{metric}`: {', '.join(values)}")
    return "; ".join(texts)


def describe_model_size_ratios(asked: ModelSizeComparison, compared: Mapping[str, Any]) -> str:
    """Return ``A → B: Parameters, M: 285 → 243, 0.851 times (the paper: 0.853)``.

    compared: entry ``sizes`` of the study's compare.json.
    """
    texts = []
    for key, metric in METRICS.items():
        pair = [compared.get(name, {}).get(key) for name in asked.models]
        if not all(pair) or (asked.metrics and key not in asked.metrics):
            continue
        ours, theirs = (pair[1][whose] / pair[0][whose] for whose in ("ours", "paper"))
        first, second = (format_size(model["ours"], key) for model in pair)
        turn = "; the other way" if (ours - 1) * (theirs - 1) < 0 else ""
        ratios = f"{ours:.3g} times (the paper: {theirs:.3g}{turn})"
        texts.append(f"{metric.label}: {first} → {second}, {ratios}")
    return f"{' → '.join(asked.models)}: {'; '.join(texts)}"


def paper_item_state_and_rows(
    row: PaperTable,
    claims: Sequence[Answer],
    studies: Studies,
    commands: Mapping[str, str],
) -> tuple[str, list[list[str]]]:
    """Return the state of a paper's table, a key of STATES, and its rows of docs/claims.md.

    A row per claim or size comparison, else one row.
    """
    values = [
        (column, text)
        for column in row.columns
        if (text := describe_unjudged_metrics(column, studies))
    ]
    sizes = studies.get(SIZES, {}).get("sizes", {})
    computed = [describe_model_size_ratios(asked, sizes) for asked in row.sizes if sizes]
    named = [*row.drawn, *(column.study for column in row.columns)]
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
    measured = ""
    if values:
        measured = "; ".join(f"{printed.phase}, {text}" for printed, text in values)
        verdict = "no claim"
        named = [printed.study for printed, _ in values]
    start = [row.number, row.shows, row.paper or "–"]
    lines = [["″", "", "", *_answer_cells(answer)] for answer in claims]
    shown = "; ".join(f"`{commands.get(name, name)}`" for name in dict.fromkeys(named))
    lines += [["″", "", "", text, "", "computed", f"`{commands[SIZES]}`"] for text in computed]
    if lines:
        lines[0][:3] = start
    return state, lines or [[*start, measured, "", verdict, shown]]


class AnswerTexts(NamedTuple):
    """The texts of an answer for tables in Markdown; "" for missing ones."""

    said: str  # the claim or question
    measured: str = ""
    difference: str = ""  # with its interval
    over: str = ""  # what the interval is over, or why there is no interval
    effect: str = ""  # what the paper prints
    verdict: str = ""


def describe_answer(answer: Answer) -> AnswerTexts:
    claim = answer.claim
    statement = claim.says if isinstance(claim, Claim) else claim.asks
    if not answer.entry:
        return AnswerTexts(statement, verdict=answer.state)
    row = build_claim_row(answer.entry)
    other = claim.against_metric and f"`{claim.against_metric}` "
    measured = f"`{claim.metric}` {claim.method} {row.values[0]}, "
    measured += f"{other}{claim.against} {row.values[1]}"
    difference, over = row.difference, row.over
    if limits := row.difference_limits:
        difference, over = f"{difference} [{limits}]", f"over {over} ({row.counts})"
    verdict = answer.verdict
    if row.detectable:
        verdict += f" ({row.detectable})"
    if holm := row.holm_note(answer.words):
        verdict += f"; {holm}"
    if row.excludes:
        verdict += f"; {row.excludes}"
    if answer.changed:
        verdict += " ‡"
    effect = row.effect and f"the paper: {row.effect}"
    return AnswerTexts(statement, measured, difference, over, effect, verdict)


def _answer_cells(answer: Answer) -> list[str]:
    """Return the cells ``here``, ``difference``, ``verdict`` and ``study``."""
    texts = describe_answer(answer)
    statement = texts.said
    if isinstance(answer.claim, Claim):
        statement += f" (“{answer.claim.quote}”)"
    here = ": ".join(filter(None, (statement, texts.measured)))
    difference = ", ".join(filter(None, (texts.difference, texts.over)))
    difference = "; ".join(filter(None, (difference, texts.effect)))
    return [here, difference, texts.verdict, f"`{answer.command}`"]


def answers_table(answers: Sequence[Answer]) -> str:
    """Return the table of a round's claims and questions in a README."""
    described = [describe_answer(answer) for answer in answers]
    overs = {texts.over for texts in described if texts.over}
    shared = overs.pop() if len(overs) == 1 else ""
    rows = []
    for answer, texts in zip(answers, described, strict=True):
        claim = answer.claim
        source = claim.source if isinstance(claim, Claim) else ""
        place = ", ".join(filter(None, (claim.paper, source)))
        over = "" if shared else texts.over
        difference = ", ".join(filter(None, (texts.difference, over)))
        difference = "; ".join(filter(None, (difference, texts.effect)))
        statement = ": ".join(filter(None, (place, texts.said)))
        rows.append((statement, texts.verdict, difference, texts.measured))
    head = ("asked", "answer", f"difference [95 %] {shared}".strip(), "measured")
    return "\n".join(markdown_table(head, rows))


def write_study_pages(root: Path = Path()) -> list[Path]:
    """Write pipelines/README.md and the tables in the READMEs of its folders below ``root``.

    Raises UserError, and writes nothing, if a folder has no README, or a text names an unknown
    number or round.
    """
    pages = render_study_pages(root)
    for path, text in pages.items():
        write_whole(root / path, text)
    return list(pages)


def render_study_pages(root: Path) -> dict[Path, str]:
    """Return path → text of pipelines/README.md and of the READMEs of its folders."""
    questions = load_questions(root)
    studies, answers = evaluate_results(
        study for question in questions for study in question.rounds
    )
    folders = sorted(dict.fromkeys(question.name.split("/")[0] for question in questions))
    readmes = {folder: _read_readme(root, folder) for folder in folders}
    sections = [
        {
            "title": _folder_title(folder, readmes[folder]),
            "verdicts": _count_verdicts(
                [answer for answer in answers if _is_in(answer.study, folder)]
            ),
            "table": _table_of(
                [question for question in questions if _is_in(question.name, folder)], studies
            ),
        }
        for folder in sorted(folders, key=lambda name: name == "ours")
    ]
    headlines = sorted(
        (headline, fill_in_numbers(answer, question, studies), _link(question))
        for question in questions
        for headline, answer in (question.document.data.get("headlines") or {}).items()
    )
    worlds = [
        (f"[{path.stem}]({WORLDS}/{path.name})", _leading_comment(path))
        for path in sorted((root / PIPELINES / WORLDS).glob("*.yaml"))
    ]
    template = template_environment().overlay(autoescape=False).get_template("studies.md.jinja")
    text = template.render(
        headlines=markdown_table(("question", "answer", "details"), headlines),
        sections=sections,
        worlds=markdown_table(("world", "what it holds equal"), worlds),
    )
    pages = {STUDIES_PAGE: text.rstrip() + "\n"}
    for folder, readme in readmes.items():
        path = PIPELINES / folder / "README.md"
        pages[path] = fill_in_answers(readme, path, studies, answers)
    return pages


def fill_in_answers(readme: str, path: Path, studies: Studies, answers: Sequence[Answer]) -> str:
    """Return a README with the tables between its markers; UserError for an unknown round."""

    def table(match: re.Match[str]) -> str:
        name = match["study"]
        if name not in studies:
            line = readme.count("\n", 0, match.start()) + 1
            raise UserError.at(
                f"{path}:{line}: answers",
                found=f"{name!r}{did_you_mean(name, list(studies))}",
                allowed="rounds of questions, such as tgr/table_3 and moge/swin.2",
            )
        of_round = [answer for answer in answers if answer.study == name]
        return f"{match['start']}\n{answers_table(of_round)}\n{match['end']}"

    return MARKED.sub(table, readme)


def fill_in_numbers(text: str, question: QuestionFile, studies: Studies) -> str:
    """Return a text with numbers in place of names like ``{test_accuracy tgr - vmoe @finetune}``.

    A number is a mean, or the absolute difference of two; shares are in percent. It comes from the
    last round that has it, or from ``of tgr/table_3``; ``:.2f`` sets the digits. Raises UserError
    for a number that no result has.
    """

    def number(match: re.Match[str]) -> str:
        rounds = [match["study"]] if match["study"] else [study.name for study in question.rounds]
        phase = match["phase"] or "pretrain"
        sides = [(match["metric"], match["method"])]
        if match["against"]:
            sides.append((match["other"] or match["metric"], match["against"]))
        for name in reversed(rounds):
            methods = studies.get(name, {})
            cells = [methods.get(side, {}).get(phase, {}).get(metric) for metric, side in sides]
            if all(cells):
                means = [cell["mean"] for cell in cells]
                size = abs(means[0] - means[1]) if match["against"] else means[0]
                return format(size * SCALES.get(cells[0]["form"], 1.0), match["digits"] or ".1f")
        raise UserError.at(
            question.path,
            found=f"{match[0]}, which no result of {' or '.join(rounds)} has",
            allowed="metric method - against @phase",
        )

    return NUMBER.sub(number, text)


def _read_readme(root: Path, folder: str) -> str:
    path = root / PIPELINES / folder / "README.md"
    if not path.is_file():
        raise UserError(f"{path}: found no such file; write one, with a section per question")
    return path.read_text(encoding="utf-8")


def _folder_title(folder: str, readme: str) -> str:
    """Return the heading of a folder's README, with a link to it."""
    name, _, title = readme.splitlines()[0].removeprefix("# ").partition(": ")
    return f"[{name}]({folder}/README.md): {title}"


def _is_in(name: str, folder: str) -> bool:
    return name.partition("/")[0] == folder


def _leading_comment(path: Path) -> str:
    """Return the comment at the start of a file, as one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = list(takewhile(lambda line: line.startswith("#"), lines))
    return " ".join(line.removeprefix("#").strip() for line in comment)


def _link(question: QuestionFile) -> str:
    folder, _, name = question.name.partition("/")
    return f"[{question.name}]({folder}/README.md#{name})"


def _table_of(questions: Sequence[QuestionFile], studies: Studies) -> list[str]:
    """Return the table of a folder: question, answer, and the command that runs it."""
    rows = []
    for question in questions:
        folder, _, name = question.name.partition("/")
        link = f"[{name}]({folder}/README.md#{name}): {question.text('question')}"
        command = f"`moecore study run {question.name}`"
        if len(question.rounds) > 1:
            command += f", {len(question.rounds)} rounds"
        answer = fill_in_numbers(question.text("answer"), question, studies)
        rows.append((link, answer or "not answered yet", command))
    return markdown_table(("question", "answer", "command"), rows)


def _count_verdicts(answers: Sequence[Answer]) -> str:
    """Return the verdicts on a folder's claims, with Holm's correction, and questions, counted."""
    claims: Counter[str] = Counter()
    questions: Counter[str] = Counter()
    for answer in answers:
        if isinstance(answer.claim, Claim):
            claims[answer.verdict_holm] += 1
        else:
            questions[answer.verdict] += 1
    lines = []
    if claims:
        counted = ", ".join(f"{claims[name]} {name}" for name in ORDER if claims[name])
        lines.append(f"Claims of papers, after Holm's correction: {counted}.")
    if questions:
        verdicts = (*ANSWERS.values(), "not significant", "not run yet")
        told = [f"{questions[name]} {SAID.get(name, name)}" for name in verdicts if questions[name]]
        lines.append(f"Questions of ours: {', '.join(told)}.")
    return " ".join(lines)
