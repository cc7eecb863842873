"""Pages in Markdown that join the papers, the questions of pipelines/ and pipelines/results/.

docs/claims.md: every table and figure of the papers beside what the studies found of it.
pipelines/README.md: the questions of each folder, with answers and commands. README.md of a folder:
tables of claims and questions, between ``<!-- answers: tgr/table_3 -->`` and ``<!-- end -->``. A
study is one round of a question; those that were not run are said to be so.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from moecore.core.files import UserError, write_whole
from moecore.report.claims.answers import Answer, Studies, count_facts_once, evaluate_results
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.measures.sizes import COUNTS, format_size
from moecore.report.page.templating import template_environment
from moecore.report.tables.cells import interval_from_json, markdown_table
from moecore.report.tables.number_format import NumberFormat
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


def write_study_index(root: Path = Path()) -> Path:
    """Write pipelines/README.md below ``root``. Raises UserError where a folder has no README."""
    target = root / STUDIES_PAGE
    write_whole(target, render_study_index(root))
    return target


def render_study_index(root: Path) -> str:
    """Return the text of pipelines/README.md."""
    questions = load_questions(root)
    _, answers = evaluate_results(one for question in questions for one in question.rounds)
    folders = list(dict.fromkeys(question.name.split("/")[0] for question in questions))
    sections = [
        {
            "title": _folder_title(root, folder),
            "verdicts": _count_verdicts([one for one in answers if _is_in(one.study, folder)]),
            "table": _table_of([one for one in questions if _is_in(one.name, folder)]),
        }
        for folder in sorted(folders, key=lambda name: name == "ours")
    ]
    headlines = sorted(
        (asked, answer, _link(question))
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
    return text.rstrip() + "\n"


def _folder_title(root: Path, folder: str) -> str:
    """The heading of a folder's README, with a link to it."""
    path = root / PIPELINES / folder / "README.md"
    if not path.is_file():
        raise UserError(f"{path}: found no such file; write one, with a section per question")
    heading = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    name, _, words = heading.partition(": ")
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


def _table_of(questions: Sequence[QuestionFile]) -> list[str]:
    """The table of a folder: question, answer, and the command that runs the last round."""
    rows = []
    for question in questions:
        folder, _, name = question.name.partition("/")
        asked = f"[{name}]({folder}/README.md#{name}): {question.text('question')}"
        command = f"`moecore study run {question.name}`"
        if len(question.rounds) > 1:
            command += f", {len(question.rounds)} rounds"
        rows.append((asked, question.text("answer") or "not answered yet", command))
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
