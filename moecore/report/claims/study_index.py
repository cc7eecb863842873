"""pipelines/README.md: the questions of each folder, with answers in one line and commands."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from moecore.core.files import UserError, write_whole
from moecore.report.claims.claims_page import Answer, evaluate_results
from moecore.report.claims.claims_table import ANSWERS
from moecore.report.page.templating import template_environment
from moecore.report.tables.cells import markdown_table
from moecore.study.questions import PIPELINES, WORLDS, QuestionFile, load_questions
from moecore.study.sections import Claim

TARGET = PIPELINES / "README.md"
SAID = {"not significant": "open"}  # of questions
ORDER = ("holds", "equivalent", "no worse", "not significant", "differs", "not run yet")


def write_study_index(root: Path = Path()) -> Path:
    """Write pipelines/README.md below ``root``. Raises UserError where a folder has no README."""
    target = root / TARGET
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
