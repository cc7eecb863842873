"""docs/answers.md: the questions that readers ask first, answered from pipelines/results/.

pipelines/answers.yaml lists the questions. Words, numbers and verdicts follow from the results; the
same questions are the first table of pipelines/README.md.
"""

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.report.claims.answers import Answer, Studies
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.claims.significance import LEVEL
from moecore.report.tables.cells import SCALES, NumberFormat, markdown_table
from moecore.statistics.intervals import Interval
from moecore.study.papers import PIPELINES
from moecore.study.params_reader import validate_document
from moecore.study.run_and_claims import Comparison, PhaseName
from moecore.study.yaml_document import YamlDocument, load_yaml_document
from tools.data_sensitivity import INSENSITIVE

QUESTIONS_FILE = PIPELINES / "answers.yaml"
ANSWERS_PAGE = Path("docs/answers.md")
YES_OR_NO = ("Do", "Does", "Is", "Are")  # first words of questions with such an answer
NUMBER = re.compile(
    r"\{(?P<metric>[^\s{}]+) (?P<method>\w+)(?: - (?:(?P<other>[^\s{}]+) )?(?P<against>\w+))?"
    r"(?: @(?P<phase>\w+))?(?: of (?P<study>[\w/.]+))?(?::(?P<digits>\.\df))?\}"
)
HEAD = ("method", "accuracy", "worst case of attacks", "two views agree", "Load CV²", "time")
METRICS = ("test_accuracy", "accuracy_worst_case", "match_top1", "load_cv2")
STEP_TIME = "training_step_ms"


class Evidence(Config):
    """A claim or question of a study that an answer cites: see ``Comparison`` for the keys."""

    study: str = Field(description="round of a question, such as tgr/table_3 or moge/swin.2")
    data: str = Field(description="what it is about, for readers")
    phase: PhaseName = "pretrain"
    metric: str
    method: str
    against: str
    against_metric: str = ""


class ReaderQuestion(Config):
    """A question that readers ask, with the answer and its evidence."""

    question: str
    answer: str = Field(description="one line; {metric method - other @phase} is a number")
    evidence: tuple[Evidence, ...] = Field(
        min_length=1, description="The first decides between yes, no and open."
    )


class MethodRow(Config):
    """A row of the table of methods."""

    method: str
    against: str = Field("vmoe", description="its baseline: V-MoE at equal k")
    says: str = Field(description="the method in words")


class ReaderQuestions(Config):
    """The content of pipelines/answers.yaml."""

    questions: tuple[ReaderQuestion, ...]
    methods: tuple[MethodRow, ...]


class AnsweredQuestion(NamedTuple):
    """A question with the answers of the studies that it cites."""

    asked: ReaderQuestion
    text: str  # the answer, with numbers
    answers: list[Answer]  # in the order of its evidence

    @property
    def evidence(self) -> list[str]:
        """A Markdown list item per cited answer."""
        return list(map(describe_evidence, self.asked.evidence, self.answers))

    @property
    def word(self) -> str:
        """Yes, no or open (not significant, insensitive); "" if the question has another answer."""
        if self.asked.question.partition(" ")[0] not in YES_OR_NO:
            return ""
        entry = self.answers[0].entry
        verdict = entry.get("verdict_holm") or entry["verdict"]
        if INSENSITIVE in entry:
            return "open"
        return ANSWERS.get(verdict, "open")

    @property
    def one_line(self) -> str:
        """The word, if any, and the text of the answer as a Markdown sentence."""
        if not self.word:
            return f"{self.text[0].upper()}{self.text[1:]}."
        return f"**{self.word.capitalize()}**: {self.text}."


def answer_readers(
    root: Path,
    studies: Studies,
    answers: Sequence[Answer],
    sensitive: Container[str],
    template: Template,
) -> tuple[list[str], dict[Path, str]]:
    """Return the Markdown lines of the table of questions, and path → text of docs/answers.md.

    Both are empty for a project without pipelines/answers.yaml. sensitive: the rounds whose data
    can tell routers apart. Raises UserError if that file is invalid, or cites what no study has
    answered.
    """
    path = root / QUESTIONS_FILE
    if not path.is_file():
        return [], {}
    document = load_yaml_document(path)
    content = validate_document(ReaderQuestions, document)
    answered = []
    differences = list_differences(answers)
    for index, question in enumerate(content.questions):
        cited = find_answers(document, index, question, answers)
        rounds = [evidence.study for evidence in question.evidence]
        text = fill_in_numbers(question.answer, path, rounds, studies, differences)
        answered.append(AnsweredQuestion(question, text, cited))
    rows = [
        (
            question.asked.question,
            question.one_line,
            link_to_study(question.asked.evidence[0].study, ""),
        )
        for question in answered
    ]
    methods = methods_table(content.methods, studies, sensitive)
    text = template.render(answered=answered, methods=methods)
    table = markdown_table(("question", "answer", "details"), rows)
    return table, {ANSWERS_PAGE: text.rstrip() + "\n"}


def find_answers(
    document: YamlDocument, index: int, question: ReaderQuestion, answers: Sequence[Answer]
) -> list[Answer]:
    """Return the answer to each evidence of question ``index``; UserError if one has no result."""
    by_comparison: dict[tuple[str, ...], Answer] = {}
    for answer in sorted(answers, key=lambda answer: answer.claim.margin is not None):
        if answer.entry:  # of several about the same numbers a direction counts, then a claim
            by_comparison.setdefault((answer.study, *_comparison_key(answer.claim)), answer)
    cited = []
    for number, evidence in enumerate(question.evidence):
        answer = by_comparison.get((evidence.study, *_comparison_key(evidence)))
        if answer is None:
            place = ("questions", index, "evidence", number)
            comparison = f"found {evidence.metric} of {evidence.method} against {evidence.against}"
            allowed = f"a claim or question that {evidence.study} has answered"
            raise document.error(place, f"{comparison}; allowed: {allowed}")
        cited.append(answer)
    return cited


def _comparison_key(claim: Comparison | Evidence) -> tuple[str, ...]:
    return (claim.phase, claim.metric, claim.method, claim.against, claim.against_metric or "")


def describe_evidence(evidence: Evidence, answer: Answer) -> str:
    """Return a Markdown list item: data, difference with interval, verdict, link to the study."""
    row = build_claim_row(answer.entry)
    limits = f" [{row.difference_limits}]" if row.difference_limits else ""
    other = f"{evidence.against_metric} of " if evidence.against_metric else ""
    sides = f"`{evidence.metric}` of {evidence.method} − {other}{evidence.against}"
    difference = f"{sides}: {row.difference}{limits} ({row.counts}), {answer.verdict_holm}"
    if INSENSITIVE in answer.entry:
        difference += ", insensitive"
    return f"- {evidence.data}: {difference}: {link_to_study(evidence.study)}"


def link_to_study(round_name: str, folder: str = "../pipelines/") -> str:
    """Return a Markdown link to a round's section of its README; folder: path to pipelines/."""
    paper, _, question = round_name.partition(".")[0].partition("/")
    return f"[{round_name}]({folder}{paper}/README.md#{question})"


def methods_table(
    methods: Sequence[MethodRow], studies: Studies, sensitive: Container[str]
) -> list[str]:
    """Return the lines of a Markdown table: each method's differences from its baseline."""
    rows = []
    for row in methods:
        cells = [_format_difference(row, metric, studies, sensitive) for metric in METRICS]
        name = f"{row.says} (`{row.method}`)"
        rows.append((name, *cells, _time_in_widest_study(row, studies)))
    return markdown_table(HEAD, rows)


def _format_difference(
    row: MethodRow, metric: str, studies: Studies, sensitive: Container[str]
) -> str:
    """Return a method's difference from its baseline: ``+1.3 pp [+0.9 to +1.7], <link>``.

    It comes from the study with most seeds among those whose data can tell routers apart, or, if
    there is none, among all studies; then a question mark follows the link. Bold: significant.
    """
    candidates = []
    for study, compared in studies.items():
        cell = _pretrained_cell(compared, row.method, metric)
        entry = cell.get("against", {}).get(row.against, {})
        if entry.get("low") is not None:
            candidates.append((study in sensitive, cell["seeds"], study, cell["form"], entry))
    if not candidates:
        return "–"
    can_tell, _, study, form, entry = max(candidates, key=lambda candidate: candidate[:2])
    interval = Interval(entry["difference"], entry["low"], entry["high"])
    printed = NumberFormat.of(form, [interval])
    text = printed.difference(interval.value)
    text = f"**{text}**" if entry["p_holm"] < LEVEL else text
    link = link_to_study(study) + ("" if can_tell else " ?")
    return f"{text} [{printed.difference_limits(interval)}], {link}"


def _time_in_widest_study(row: MethodRow, studies: Studies) -> str:
    """Return the ratio of step times as text, ``1.20 × [study](link)``, of most seeds; or ``–``."""
    candidates = []
    for study, compared in studies.items():
        ours = _pretrained_cell(compared, row.method, STEP_TIME)
        theirs = _pretrained_cell(compared, row.against, STEP_TIME)
        if ours and theirs:
            candidates.append((ours["seeds"], study, ours["mean"] / theirs["mean"]))
    if not candidates:
        return "–"
    _, study, ratio = max(candidates, key=lambda candidate: candidate[0])
    return f"{ratio:.2f} × {link_to_study(study)}"


def _pretrained_cell(compared: Mapping[str, Any], method: str, metric: str) -> Mapping[str, Any]:
    return compared.get(method, {}).get("pretrain", {}).get(metric, {})


Differences = Mapping[tuple[str, ...], float]  # (study, phase, two metrics and methods) → mean


def list_differences(answers: Sequence[Answer]) -> Differences:
    """Return the differences of all answers, which of claims are over all runs of a design."""
    return {
        (
            answer.study,
            answer.claim.phase,
            answer.claim.metric,
            answer.claim.method,
            answer.claim.against_metric or answer.claim.metric,
            answer.claim.against,
        ): answer.entry["difference"]["mean"]
        for answer in answers
        if answer.entry
    }


def fill_in_numbers(
    text: str, path: Path, rounds: Sequence[str], studies: Studies, differences: Differences
) -> str:
    """Return a text with numbers in place of names like ``{test_accuracy tgr - vmoe @finetune}``.

    A number is a mean, or the absolute difference of two, as a claim on them has it; shares are in
    percent. It comes from the last of ``rounds`` that has it, or from ``of tgr/table_3``; ``:.2f``
    sets the digits. Raises UserError for a number that no result has.
    """

    def number(match: re.Match[str]) -> str:
        names = [match["study"]] if match["study"] else rounds
        phase = match["phase"] or "pretrain"
        sides = [(match["metric"], match["method"])]
        if match["against"]:
            sides.append((match["other"] or match["metric"], match["against"]))
        for name in reversed(names):
            methods = studies.get(name, {})
            cells = [methods.get(side, {}).get(phase, {}).get(metric) for metric, side in sides]
            if all(cells):
                means = [cell["mean"] for cell in cells]
                size = means[0]
                if match["against"]:
                    key = (name, phase, *sides[0], *sides[1])
                    size = abs(differences.get(key, means[0] - means[1]))
                return format(size * SCALES.get(cells[0]["form"], 1.0), match["digits"] or ".1f")
        raise UserError.at(
            path,
            found=f"{match[0]}, which no result of {' or '.join(names)} has",
            allowed="metric method - against @phase",
        )

    return NUMBER.sub(number, text)
