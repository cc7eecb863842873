"""Pages in Markdown from the papers, the questions of pipelines/ and pipelines/results/.

`make pages` writes them. docs/claims.md: every table and figure of the papers, with what the
studies found. docs/answers.md: reader_answers.py. pipelines/README.md: its questions, and those of
each folder, with answers and commands. README.md of a folder: tables of claims and questions,
between ``<!-- answers: tgr/table_3 -->`` and ``<!-- end -->``.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moecore.core.files import UserError, write_atomic
from moecore.measure.values import place_slug
from moecore.report.claims.answers import Answer, Studies
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.claims.items_and_dates import read_stored_side_values
from moecore.report.claims.significance import LEVEL
from moecore.report.tables.cells import (
    REPORTED_COSTS,
    NumberFormat,
    interval_from_json,
    markdown_table,
)
from moecore.study import papers
from moecore.study.questions import (
    RATE,
    THRESHOLD_KEY,
    TUNED_KEY,
    WORLDS,
    QuestionFile,
    QuestionRound,
    load_questions,
    load_rounds,
)
from moecore.study.run_and_claims import Claim, Comparison, Question
from moecore.study.yaml_document import did_you_mean
from tools.data_sensitivity import (
    INSENSITIVE,
    Controls,
    counted_verdict,
    describe_round,
    find_controls,
    find_sensitive_rounds,
    mark_insensitive,
)
from tools.designs import measure_linearity
from tools.pooled_claims import PooledAnswer, describe_history, evaluate_pooled
from tools.reader_answers import Differences, answer_readers, fill_in_numbers, list_differences

CLAIMS_PAGE = Path("docs/claims.md")
STUDIES_PAGE = papers.PIPELINES / "README.md"
DECIDED = ("holds", "equivalent", "no worse", "differs")
ORDER = (*DECIDED, INSENSITIVE, "not significant", "not run yet")
MARKED = re.compile(
    r"(?P<start><!-- answers: (?P<study>\S+) -->)\n.*?(?P<end><!-- end -->)", re.DOTALL
)
HEAD = (
    "where",
    "shows",
    "the paper",
    "here",
    "difference",
    "verdict",
    "earlier answers, other designs",
    "study",
)
STATES = {
    "judged": "judged by a claim",
    "printed": "printed beside the paper's, without a claim",
    "computed": "computed beside the paper's, without a trained model",
    "drawn": "drawn on a study's page",
    "not run yet": "in a study that was not run yet with these claims",
    "no study yet": "in no study yet",
    "cannot": "cannot be printed here (see there)",
    "scheme": "a scheme or settings: nothing to print",
}


def drop_repeated_claims(claims: Sequence[Answer]) -> list[Answer]:
    """Return the claims without those that test the sentence and effect of an earlier one."""
    studies: dict[tuple[Any, ...], str] = {}
    for answer in sorted(claims, key=lambda answer: not answer.entry):
        studies.setdefault(_fact_key(answer.claim), answer.study)
    return [answer for answer in claims if studies[_fact_key(answer.claim)] == answer.study]


def _fact_key(claim: Claim | Question) -> tuple[Any, ...]:
    assert isinstance(claim, Claim), "a question is no fact of a paper"
    return claim.paper, claim.source, claim.quote, claim.metric, claim.better, claim.effect


def template_environment() -> Environment:
    """Return the Jinja environment of the Markdown pages."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def evaluate_rounds(
    rounds: Sequence[QuestionRound],
) -> tuple[Studies, list[PooledAnswer], Controls]:
    """Return round → result, the answers over all runs of a design, and what data can show."""
    studies, pooled = evaluate_pooled(rounds)
    controls = find_controls(rounds, studies)
    return studies, mark_insensitive(pooled, rounds, controls), controls


def write_claims_page(root: Path = Path()) -> Path:
    """Write docs/claims.md below ``root``, return its path; UserError if a source is damaged."""
    target = root / CLAIMS_PAGE
    write_atomic(target, render_claims_page(root))
    return target


def render_claims_page(root: Path = Path(), rounds: Sequence[QuestionRound] | None = None) -> str:
    """Return the text of docs/claims.md; rounds: all rounds of questions, None to read them."""
    if rounds is None:
        rounds = load_rounds(root)
    by_name = {study.name: study for study in rounds}
    studies, pooled, _ = evaluate_rounds(rounds)
    claims = [each for each in pooled if isinstance(each.answer.claim, Claim)]
    states: Counter[str] = Counter()
    tables = {}
    listed = set()  # (paper, source)
    for paper in papers.load_papers(root).values():
        cells = []
        for row in paper.tables:
            sources = {row.number, *(claimed.get("source") for claimed in row.claims.values())}
            places = {(paper.name, source) for source in sources}
            of_row = [each for each in claims if _place_of(each.answer) in places]
            listed |= places
            state, lines = paper_item_state_and_rows(row, of_row, studies, by_name)
            states[state] += 1
            cells += lines
        tables[paper.name] = markdown_table(HEAD, cells)
    if cells := [
        [*_place_of(each.answer), *_answer_cells(each)]
        for each in claims
        if _place_of(each.answer) not in listed
    ]:
        tables["Claims of other sources"] = markdown_table(("paper", "where", *HEAD[3:]), cells)
    questions = [each for each in pooled if isinstance(each.answer.claim, Question)]
    if questions:
        head = ("question", "difference", "answer", "study")
        cells = [[*cells[:3], cells[-1]] for cells in map(_answer_cells, questions)]
        tables["What no paper claims, asked of these runs"] = markdown_table(head, cells)
    facts = drop_repeated_claims([each.answer for each in claims])
    looks = Counter(each.looks for each in claims if each.answer.entry)
    verdicts = Counter(map(counted_verdict, facts))
    template = template_environment().get_template("claims.md.jinja")
    numbers = {
        "facts": facts,
        "told": _list_counts(verdicts, ORDER),
        "excluding": sum(
            bool(build_claim_row(answer.entry).excludes) for answer in facts if answer.entry
        ),
        "changed": sum(answer.changed for answer in facts),
        "changed_questions": sum(each.answer.changed for each in questions),
        "asked_again": looks.total() - looks[1],
        "most_looks": max(looks, default=1),
        "states": states,
    }
    return template.render(numbers, words_of_states=STATES, tables=tables).rstrip() + "\n"


def _place_of(answer: Answer) -> tuple[str, str]:
    return answer.claim.paper, answer.source


def describe_unjudged_metrics(printed: papers.PrintedUntestedMetrics, studies: Studies) -> str:
    """Return metrics that no claim judges as text: "`test_mae`: vmoe 5.1, prc 5.3; …", or ""."""
    compared = studies.get(printed.study, {})
    texts = []
    for metric in printed.metrics:
        cells = {
            method: cell
            for method in printed.methods
            if (cell := compared.get(method, {}).get(printed.phase, {}).get(metric))
        }
        if cells:
            form = next(iter(cells.values()))["form"]
            number_format = NumberFormat.of(form, map(interval_from_json, cells.values()))
            values = [f"{name} {number_format.value(cell['mean'])}" for name, cell in cells.items()]
            texts.append(f"`{metric}`: {', '.join(values)}")
    return "; ".join(texts)


def describe_linearity(
    printed: papers.PrintedUntestedMetrics, studies: Studies, rounds: Mapping[str, QuestionRound]
) -> tuple[str, str]:
    """Return deviations from a line and the verdict, if the metrics have ``levels``, else ""."""
    if not printed.levels or not studies.get(printed.study):
        return "", ""
    study = rounds[printed.study]
    columns = []
    for method in printed.methods[1:]:
        pair = Comparison(
            metric=printed.metrics[0],
            method=method,
            against=printed.methods[0],
            better="higher",
            phase=printed.phase,
        )
        sides = read_stored_side_values(study, studies[printed.study], pair)
        if sides is None:
            raise UserError.at(
                study.question.results_path,
                found=f"no items of {pair.words}",
                allowed="items of all the levels",
            )
        columns += [sides[0]] if columns else [sides[1], sides[0]]
    values = np.stack([column.reshape(len(column), -1).mean(axis=1) for column in columns], axis=1)
    tested = measure_linearity(values, printed.levels)
    text = f"from a line at most {tested.deviation:.3g}, {tested.share:.0%} of the rise"
    verdict = "roughly linear" if tested.p < LEVEL else "not shown to be roughly linear"
    numbers = f"no point is a third of the rise away: p = {tested.p:.2g}"
    return text, f"{verdict} ({numbers}; exactly linear: p = {tested.p_exact:.2g})"


def describe_computed_pair(computed: papers.CalculationRatio, compared: Mapping[str, Any]) -> str:
    """Return ``A → B: `parameters`: 285 → 243, 0.851 times (the paper: 0.853)``; "" if not run."""
    texts = []
    cells = {}
    for values in compared.get("calculations", {}).values():
        cells |= values
    for metric in computed.metrics:
        names = [f"{metric}_{place_slug(place)}" for place in computed.places]
        if not cells.keys() >= set(names):
            continue
        pair = [interval_from_json(cells[name]) for name in names]
        ours = pair[1].value / pair[0].value
        below, above = (REPORTED_COSTS[model].values[metric] for model in computed.printed)
        theirs = above / below
        number_format = NumberFormat.of(cells[names[0]]["form"], pair)
        first, second = (number_format.value(number.value) for number in pair)
        turn = "; the other way" if (ours - 1) * (theirs - 1) < 0 else ""
        ratios = f"{ours:.3g} times (the paper: {theirs:.3g}{turn})"
        texts.append(f"`{metric}`: {first} → {second}, {ratios}")
    return f"{' → '.join(computed.places)}: {'; '.join(texts)}" if texts else ""


def paper_item_state_and_rows(
    row: papers.PaperTable,
    claims: Sequence[PooledAnswer],
    studies: Studies,
    rounds: Mapping[str, QuestionRound],
) -> tuple[str, list[list[str]]]:
    """Return the state of a paper's table, a key of STATES, and its rows of docs/claims.md.

    claims: those of this table; studies: round → result; rounds: by their names.
    """
    values = [
        (column, text)
        for column in row.columns
        if (text := describe_unjudged_metrics(column, studies))
    ]
    computed = [
        (text, pair.study)
        for pair in row.computed
        if (text := describe_computed_pair(pair, studies.get(pair.study, {})))
    ]
    commands = {name: study.command for name, study in rounds.items()}
    named = [*row.drawn, *(column.study for column in row.columns)]
    verdict = "–"
    if row.scheme:
        state = "scheme"
    elif row.needs:
        state = "cannot"
        verdict = f"needs {row.needs}"
    elif any(each.answer.entry for each in claims):
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
    start = [row.number, row.shows, row.paper or "–"]
    lines = [["″", "", "", *_answer_cells(each)] for each in claims]
    for printed, text in values:
        deviation, tested = describe_linearity(printed, studies, rounds)
        cells = [f"{printed.phase}, {text}", deviation, tested or "no claim", ""]
        lines.append(["″", "", "", *cells, f"`{commands[printed.study]}`"])
    lines += [
        ["″", "", "", text, "", "computed", "", f"`{commands[study]}`"] for text, study in computed
    ]
    lines += [
        ["″", "", "", claim.says, claim.found, f"withdrawn: {claim.why}", "", ""]
        for claim in row.withdrawn
    ]
    if lines:
        lines[0][:3] = start
    shown = "; ".join(f"`{commands.get(name, name)}`" for name in dict.fromkeys(named))
    return state, lines or [[*start, "", "", verdict, "", shown]]


class AnswerTexts(NamedTuple):
    """The texts of an answer for tables in Markdown; "" for missing ones."""

    statement: str  # the claim or question
    measured: str = ""
    difference: str = ""  # with its interval
    over: str = ""  # what the interval is over, or why there is no interval
    effect: str = ""  # what the paper prints
    verdict: str = ""

    def describe_difference(self, over: str) -> str:
        difference = ", ".join(filter(None, (self.difference, over)))
        return "; ".join(filter(None, (difference, self.effect)))


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
        difference = f"{difference} [{limits}]"
        over = f"over {over} ({row.counts})"
    verdict = answer.verdict
    if row.detectable:
        verdict += f" ({row.detectable})"
    if holm := row.holm_note(answer.verdict_texts):
        verdict += f"; {holm}"
    if row.excludes:
        verdict += f"; {row.excludes}"
    if (looks := answer.entry.get("looks", 1)) > 1:
        verdict += f"; p × {2**looks} for {looks} answers"
    if why := answer.entry.get(INSENSITIVE):
        verdict += f"; insensitive ({why})"
    if answer.entry.get("late"):
        verdict += "; asked after the run"
    if answer.changed:
        verdict += " ‡"
    effect = row.effect and f"the paper: {row.effect}"
    return AnswerTexts(statement, measured, difference, over, effect, verdict)


def _answer_cells(pooled: PooledAnswer) -> list[str]:
    """Return cells of docs/claims.md: here, difference, verdict, earlier answers and study."""
    answer = pooled.answer
    texts = describe_answer(answer)
    statement = texts.statement
    if isinstance(answer.claim, Claim):
        statement += f" (“{answer.claim.quote}”)"
    measured = ": ".join(filter(None, (statement, texts.measured)))
    difference = texts.describe_difference(texts.over)
    return [measured, difference, texts.verdict, describe_history(pooled), f"`{answer.command}`"]


def round_answers_table(answers: Sequence[PooledAnswer]) -> str:
    """Return a Markdown table with a row per claim or question of one round, for a README."""
    described = [describe_answer(each.answer) for each in answers]
    overs = {texts.over for texts in described if texts.over}
    shared = overs.pop() if len(overs) == 1 else ""
    rows = []
    for each, texts in zip(answers, described, strict=True):
        place = ", ".join(filter(None, _place_of(each.answer)))
        difference = texts.describe_difference("" if shared else texts.over)
        statement = ": ".join(filter(None, (place, texts.statement)))
        history = describe_history(each)
        rows.append((statement, texts.verdict, difference, texts.measured, history))
    head = ("asked", "answer", f"difference [95 %] {shared}".strip(), "measured", HEAD[-2])
    if not any(row[-1] for row in rows):
        head = head[:-1]
        rows = [row[:-1] for row in rows]
    return "\n".join(markdown_table(head, rows))


def write_study_pages(root: Path = Path()) -> list[Path]:
    """Write the READMEs of pipelines/ and its folders, all or none; return their paths."""
    pages = render_study_pages(root)
    for path, text in pages.items():
        write_atomic(root / path, text)
    return list(pages)


def render_study_pages(root: Path) -> dict[Path, str]:
    """Return path → text of pipelines/README.md, docs/answers.md and the READMEs of its folders."""
    questions = load_questions(root)
    rounds = [study for question in questions for study in question.rounds]
    studies, pooled, controls = evaluate_rounds(rounds)
    answers = [each.answer for each in pooled]
    differences = list_differences(answers)
    folders = sorted(dict.fromkeys(question.name.split("/")[0] for question in questions))
    readmes = {}
    for folder in folders:
        path = root / papers.PIPELINES / folder / "README.md"
        if not path.is_file():
            raise UserError(f"{path}: found no such file; write one, with a section per question")
        readmes[folder] = path.read_text(encoding="utf-8")
    sections = []
    for folder in sorted(folders, key=lambda name: name == "ours"):
        of_folder = [question for question in questions if question.name.startswith(f"{folder}/")]
        judged = [answer for answer in answers if answer.study.startswith(f"{folder}/")]
        name, _, title = readmes[folder].splitlines()[0].removeprefix("# ").partition(": ")
        sections.append(
            {
                "title": f"[{name}]({folder}/README.md): {title}",
                "verdicts": _count_verdicts(judged),
                "table": _question_table(of_folder, studies, differences),
            }
        )
    template = template_environment().get_template("answers.md.jinja")
    sensitive = find_sensitive_rounds(rounds, controls)
    answered, answers_page = answer_readers(root, studies, answers, sensitive, template)
    worlds = []
    for path in sorted((root / papers.PIPELINES / WORLDS).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        # What was tried is for readers of the file.
        comment = takewhile(lambda line: line.startswith("#") and line[2:7] != "Tried", lines)
        purpose = " ".join(line.removeprefix("#").strip() for line in comment)
        worlds.append((f"[{path.stem}]({WORLDS}/{path.name})", purpose))
    template = template_environment().get_template("studies.md.jinja")
    text = template.render(
        answered=answered,
        sections=sections,
        worlds=markdown_table(("world", "what it holds equal"), worlds),
    )
    pages = {STUDIES_PAGE: text.rstrip() + "\n"} | answers_page
    for folder, readme in readmes.items():
        path = papers.PIPELINES / folder / "README.md"
        pages[path] = fill_in_answers(rounds, readme, path, pooled, controls)
    return pages


def tuned_rates(study: QuestionRound) -> str:
    """Return a sentence with the learning rates that a round's question tuned, or ""."""
    kept = study.question.read_results().get(TUNED_KEY)
    if kept is None:
        return ""
    grid, seeds = (
        ", ".join(f"{value:g}" for value in kept[key]) for key in ("learning_rates", "seeds")
    )
    chosen = ", ".join(f"{name} {choice[RATE]:g}" for name, choice in kept["methods"].items())
    return (
        f"Learning rates, chosen from {grid} by {kept['score']} over seeds {seeds}, which no round "
        f"has: {chosen}. {describe_threshold(kept.get(THRESHOLD_KEY))}".rstrip()
    )


def describe_threshold(tuned: Mapping[str, Any] | None) -> str:
    """Return a sentence with the threshold that a question tuned, and its fallback, or ""."""
    if tuned is None:
        return ""
    tried = ", ".join(f"{share:.2%} at {value:g}" for value, share in tuned["shares"])
    text = f"Threshold of the routers that have one: {tuned['chosen']:g}, with the fallback on"
    return f"{text} validation images nearest to the paper's: of {tuned['method']} {tried}."


def describe_fallback(study: QuestionRound, answers: Sequence[Answer]) -> str:
    """Return a sentence with threshold and fallback of the methods asked about, or ""."""
    results = study.read_numbers()
    methods = study.compose().document.data.get("methods") or {}
    asked = {(name, a.claim.phase) for a in answers for name in (a.claim.method, a.claim.against)}
    texts = []
    for name, phase in sorted(asked):
        router = (methods.get(name) or {}).get("router") or {}
        measured = results.get(name, {}).get(phase, {}).get("fallback")
        if measured and THRESHOLD_KEY in router:
            texts.append(
                f"{name} {measured['mean']:.1%} at T = {router[THRESHOLD_KEY]:g} ({phase})"
            )
    return f"Tokens in fallback, of test images: {', '.join(texts)}." if texts else ""


def fill_in_answers(
    rounds: Sequence[QuestionRound],
    readme: str,
    path: Path,
    answers: Sequence[PooledAnswer],
    controls: Controls,
) -> str:
    """Return a README with new tables between its markers; UserError for an unknown round."""
    studies = {study.name: study for study in rounds}

    def table(match: re.Match[str]) -> str:
        name = match["study"]
        if name not in studies:
            line = readme.count("\n", 0, match.start()) + 1
            raise UserError.at(
                f"{path}:{line}: answers",
                found=f"{name!r}{did_you_mean(name, list(studies))}",
                allowed="rounds of questions, such as tgr/table_3 and moge/swin.2",
            )
        study = studies[name]
        of_round = [each for each in answers if each.answer.study == name]
        parts = [describe_round(study, controls), round_answers_table(of_round)]
        parts += [tuned_rates(study), describe_fallback(study, [each.answer for each in of_round])]
        filled = "\n\n".join(filter(None, parts))
        return f"{match['start']}\n{filled}\n{match['end']}"

    return MARKED.sub(table, readme)


def _question_table(
    questions: Sequence[QuestionFile], studies: Studies, differences: Differences
) -> list[str]:
    """Return the Markdown lines of a folder's table: question, answer, and command to run it."""
    rows = []
    for question in questions:
        folder, _, name = question.name.partition("/")
        link = f"[{name}]({folder}/README.md#{name}): {question.text('question')}"
        command = f"`moecore study run {question.name}`"
        if len(question.rounds) > 1:
            command += f", {len(question.rounds)} rounds"
        rounds = [study.name for study in question.rounds]
        text = question.text("answer")
        answer = fill_in_numbers(text, question.path, rounds, studies, differences)
        rows.append((link, answer or "not answered yet", command))
    return markdown_table(("question", "answer", "command"), rows)


def _count_verdicts(answers: Sequence[Answer]) -> str:
    """Return sentences that count the verdicts on claims, with Holm's correction, and questions."""
    claims = Counter(counted_verdict(answer) for answer in answers if answer.source)
    questions = Counter(answer.verdict for answer in answers if not answer.source)
    lines = []
    if claims:
        lines.append(f"Claims of papers, after Holm's correction: {_list_counts(claims, ORDER)}.")
    if questions:
        verdicts = (*ANSWERS.values(), "not significant", "not run yet")
        counts = _list_counts(questions, verdicts).replace("not significant", "open")
        lines.append(f"Questions of ours: {counts}.")
    return " ".join(lines)


def _list_counts(counts: Counter[str], names: Sequence[str]) -> str:
    """Return the counts as text, such as "3 holds, 1 differs", in the order of ``names``."""
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def main() -> None:
    """Write all pages; print their paths."""
    for path in (write_claims_page(), *write_study_pages()):
        print(f"{path}: written")


if __name__ == "__main__":
    main()
