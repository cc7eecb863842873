"""Pages in Markdown that join the papers, the questions of pipelines/ and pipelines/results/.

docs/claims.md: every table and figure of the papers beside what the studies found of it.
pipelines/README.md: the questions of each folder, with answers and commands. README.md of a folder:
tables of claims and questions, between ``<!-- answers: tgr/table_3 -->`` and ``<!-- end -->``. A
study is one round of a question; those that were not run are said to be so.
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
from moecore.study.questions import WORLDS, QuestionFile, load_questions
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
SAID = {"not significant": "open"}  # of questions
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
    rounds = [one for question in load_questions(root) for one in question.rounds]
    commands = {one.name: one.command for one in rounds}
    studies, answers = evaluate_results(rounds)
    claims = [answer for answer in answers if isinstance(answer.claim, Claim)]
    states: Counter[str] = Counter()
    tables = {}
    others = claims
    for paper in load_papers(root).values():
        cells = []
        for row in paper.tables:
            of_row = [answer for answer in claims if _stands_in(row, paper.name, answer.claim)]
            others = [answer for answer in others if answer not in of_row]
            state, lines = paper_item_state_and_rows(row, of_row, studies, commands)
            states[state] += 1
            cells += lines
        tables[paper.name] = markdown_table(HEAD, cells)
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


def _stands_in(row: PaperTable, paper: str, claim: Claim | Question) -> bool:
    sources = {row.number, *(one["source"] for one in row.claims.values() if "source" in one)}
    return isinstance(claim, Claim) and claim.paper == paper and claim.source in sources


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
    for key, metric in METRICS.items():
        pair = [compared.get(name, {}).get(key) for name in asked.models]
        if not all(pair) or (asked.metrics and key not in asked.metrics):
            continue
        ours, theirs = (pair[1][whose] / pair[0][whose] for whose in ("ours", "paper"))
        there, here = (format_size(one["ours"], key) for one in pair)
        turn = "; the other way" if (ours - 1) * (theirs - 1) < 0 else ""
        ratios = f"{ours:.3g} times (the paper: {theirs:.3g}{turn})"
        words.append(f"{metric.label}: {there} → {here}, {ratios}")
    return f"{' → '.join(asked.models)}: {'; '.join(words)}"


def paper_item_state_and_rows(
    row: PaperTable,
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


class AnswerTexts(NamedTuple):
    """An answer in words, as a table of Markdown has them; "" for what was not found."""

    said: str  # the claim or question
    measured: str = ""
    difference: str = ""  # with its interval
    over: str = ""  # what the interval is over; why there is none
    effect: str = ""  # what the paper prints
    verdict: str = ""


def describe_answer(answer: Answer) -> AnswerTexts:
    """Return the words of docs/claims.md and of the READMEs."""
    claim = answer.claim
    said = claim.says if isinstance(claim, Claim) else claim.asks
    if not answer.entry:
        return AnswerTexts(said, verdict=answer.state)
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
    return AnswerTexts(said, measured, difference, over, effect, verdict)


def _answer_cells(answer: Answer) -> list[str]:
    """Return here, difference, verdict, study."""
    texts = describe_answer(answer)
    here = texts.said
    if isinstance(answer.claim, Claim):
        here += f" (“{answer.claim.quote}”)"
    here = ": ".join(filter(None, (here, texts.measured)))
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
        where = ", ".join(filter(None, (claim.paper, source)))
        over = "" if shared else texts.over
        difference = ", ".join(filter(None, (texts.difference, over)))
        difference = "; ".join(filter(None, (difference, texts.effect)))
        said = ": ".join(filter(None, (where, texts.said)))
        rows.append((said, texts.verdict, difference, texts.measured))
    head = ("asked", "answer", f"difference [95 %] {shared}".strip(), "measured")
    return "\n".join(markdown_table(head, rows))


def write_study_pages(root: Path = Path()) -> list[Path]:
    """Write pipelines/README.md and the tables in the READMEs of its folders below ``root``.

    Raises UserError, and writes nothing, where a folder has no README, or a text names a number or
    a round that does not exist.
    """
    pages = render_study_pages(root)
    for path, text in pages.items():
        write_whole(root / path, text)
    return list(pages)


def render_study_pages(root: Path) -> dict[Path, str]:
    """Return path → text of pipelines/README.md and of the READMEs of its folders."""
    questions = load_questions(root)
    studies, answers = evaluate_results(one for question in questions for one in question.rounds)
    folders = sorted(dict.fromkeys(question.name.split("/")[0] for question in questions))
    readmes = {folder: _read_readme(root, folder) for folder in folders}
    sections = [
        {
            "title": _folder_title(folder, readmes[folder]),
            "verdicts": _count_verdicts([one for one in answers if _is_in(one.study, folder)]),
            "table": _table_of([one for one in questions if _is_in(one.name, folder)], studies),
        }
        for folder in sorted(folders, key=lambda name: name == "ours")
    ]
    headlines = sorted(
        (asked, fill_in_numbers(answer, question, studies), _link(question))
        for question in questions
        for asked, answer in (question.document.data.get("headlines") or {}).items()
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
    """Return a README with the tables between its markers. Raises UserError for no such round."""

    def table(match: re.Match[str]) -> str:
        name = match["study"]
        if name not in studies:
            line = readme.count("\n", 0, match.start()) + 1
            hint = did_you_mean(name, list(studies))
            allowed = "allowed: rounds of questions, such as tgr/table_3 and moge/swin.2"
            raise UserError(f"{path}:{line}: answers: found {name!r}{hint}; {allowed}")
        of_round = [answer for answer in answers if answer.study == name]
        return f"{match['start']}\n{answers_table(of_round)}\n{match['end']}"

    return MARKED.sub(table, readme)


def fill_in_numbers(text: str, question: QuestionFile, studies: Studies) -> str:
    """Return a text with the numbers that it names: ``{test_accuracy tgr - vmoe @finetune}``.

    One mean, or the size of a difference of two; shares in percent. They are of the last round that
    has them, or of the round ``of tgr/table_3`` at the end; ``:.2f`` says the digits. Raises
    UserError for a number that no result has.
    """

    def number(match: re.Match[str]) -> str:
        rounds = [match["study"]] if match["study"] else [one.name for one in question.rounds]
        phase = match["phase"] or "pretrain"
        sides = [(match["metric"], match["method"])]
        if match["against"]:
            sides.append((match["other"] or match["metric"], match["against"]))
        for name in reversed(rounds):
            methods = studies.get(name, {})
            cells = [methods.get(side, {}).get(phase, {}).get(metric) for metric, side in sides]
            if all(cells):
                first, *others = (cell["mean"] for cell in cells)
                size = abs(first - others[0]) if others else first
                return format(size * SCALES.get(cells[0]["form"], 1.0), match["digits"] or ".1f")
        problem = f"found {match[0]}, which no result of {' or '.join(rounds)} has"
        raise UserError(f"{question.path}: {problem}; allowed: metric method - against @phase")

    return NUMBER.sub(number, text)


def _read_readme(root: Path, folder: str) -> str:
    path = root / PIPELINES / folder / "README.md"
    if not path.is_file():
        raise UserError(f"{path}: found no such file; write one, with a section per question")
    return path.read_text(encoding="utf-8")


def _folder_title(folder: str, readme: str) -> str:
    """The heading of a folder's README, with a link to it."""
    name, _, words = readme.splitlines()[0].removeprefix("# ").partition(": ")
    return f"[{name}]({folder}/README.md): {words}"


def _is_in(name: str, folder: str) -> bool:
    return name.partition("/")[0] == folder


def _leading_comment(path: Path) -> str:
    """The comment with which a file begins, as one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = list(takewhile(lambda line: line.startswith("#"), lines))
    return " ".join(line.removeprefix("#").strip() for line in comment)


def _link(question: QuestionFile) -> str:
    folder, _, name = question.name.partition("/")
    return f"[{question.name}]({folder}/README.md#{name})"


def _table_of(questions: Sequence[QuestionFile], studies: Studies) -> list[str]:
    """The table of a folder: question, answer, and the command that runs the last round."""
    rows = []
    for question in questions:
        folder, _, name = question.name.partition("/")
        asked = f"[{name}]({folder}/README.md#{name}): {question.text('question')}"
        command = f"`moecore study run {question.name}`"
        if len(question.rounds) > 1:
            command += f", {len(question.rounds)} rounds"
        answer = fill_in_numbers(question.text("answer"), question, studies)
        rows.append((asked, answer or "not answered yet", command))
    return markdown_table(("question", "answer", "command"), rows)


def _count_verdicts(answers: Sequence[Answer]) -> str:
    """What became of a folder's claims, with Holm's correction, and of its questions, in words."""
    claims = Counter(one.verdict_holm for one in answers if isinstance(one.claim, Claim))
    asked = Counter(one.verdict for one in answers if not isinstance(one.claim, Claim))
    lines = []
    if claims:
        counted = ", ".join(f"{claims[name]} {name}" for name in ORDER if claims[name])
        lines.append(f"Claims of papers, after Holm's correction: {counted}.")
    if asked:
        words = (*ANSWERS.values(), "not significant", "not run yet")
        told = [f"{asked[name]} {SAID.get(name, name)}" for name in words if asked[name]]
        lines.append(f"Questions of ours: {', '.join(told)}.")
    return " ".join(lines)
