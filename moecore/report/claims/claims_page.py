"""docs/claims.md: every table and figure of the papers beside what the studies found of it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moecore.core.files import write_whole
from moecore.report.claims.all_claims import (
    STATES,
    Answer,
    Row,
    Status,
    Study,
    Tables,
    answers_of,
    claims_in_row,
    load_studies,
    read_paper_tables,
    row_status,
    values_of,
)
from moecore.report.claims.claim_row import ANSWERS, build_claim_row
from moecore.report.markdown import markdown_table
from moecore.study.reading.claims_section import Claim, Question

TARGET = Path("docs/claims.md")
VERDICTS = {"open": "not significant"}  # how a verdict is printed, if not by its name
HEAD = ("where", "shows", "the paper", "here", "difference", "verdict", "study")


def write_claims_page(root: Path = Path()) -> Path:
    """Write docs/claims.md below ``root``; raises UserError where a file is damaged."""
    target = root / TARGET
    write_whole(target, render_claims_page(root))
    return target


def render_claims_page(root: Path = Path()) -> str:
    """The text of docs/claims.md."""
    known = read_paper_tables()
    studies = list(load_studies(root))
    answers = [answer for study in studies for answer in answers_of(study)]
    claims = [answer for answer in answers if isinstance(answer.claim, Claim)]
    papers = {name: getattr(known, name) for name in Tables.model_fields}
    states = [
        row_status(row, claims_in_row(row, name, claims), studies) for name, row in _rows(papers)
    ]
    lines = [*_opening(states, claims), ""]
    for name, rows in papers.items():
        table = [
            cells
            for row in rows
            for cells in _row_lines(row, claims_in_row(row, name, claims), studies)
        ]
        lines += [f"## {name}", "", *markdown_table(HEAD, table), ""]
    lines += _others(papers, claims)
    lines += _questions([answer for answer in answers if isinstance(answer.claim, Question)])
    return "\n".join(lines).rstrip() + "\n"


def _rows(papers: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, Row]]:
    for name, rows in papers.items():
        for row in rows:
            yield name, row


def _opening(states: Sequence[Status], claims: Sequence[Answer]) -> list[str]:
    """The counts at the page's head."""
    counted = Counter(states)
    rows = [f"- {counted[name]} {words}" for name, words in STATES.items() if counted[name]]
    verdicts = Counter(VERDICTS.get(one.verdict, one.verdict) or "not run yet" for one in claims)
    order = ("holds", "equivalent", VERDICTS["open"], "differs", "not run yet")
    told = ", ".join(f"{verdicts[name]} {name}" for name in order if verdicts[name])
    lines = [
        "# What the papers show, and what the studies here found of it",
        "",
        "Written by `moecore claims write` from the studies' params.yaml and reports/compare.json;"
        " not by hand. Data and sizes are not those of the papers: a verdict is about these runs.",
        "",
        f"Of {len(states)} tables, figures and sentences:",
        "",
        *rows,
        "",
        f"Of {len(claims)} claims: {told}.",
    ]
    if changed := sum(one.changed for one in claims):
        lines.append(f"Since {changed} of them (marked ‡) settings of the study were changed.")
    lines += [
        "",
        "*difference*: the claimed method minus the other with its 95 % interval, and what that is"
        " over; *not significant* names the smallest difference that the design could detect (80 %"
        " power at 5 %); *differs*: these runs show the opposite, which says nothing of the paper's"
        " own. [intervals.md](intervals.md) says how.",
    ]
    return lines


def _row_lines(row: Row, claims: Sequence[Answer], studies: Sequence[Study]) -> Iterator[list[str]]:
    """A line for each claim of a row, else one for what is printed, drawn or absent."""
    start = [row.number, row.shows, row.paper or "–"]
    for answer in claims:
        yield [*start, *_answer_cells(answer)]
        start = ["″", "", ""]
    if claims:
        return
    printed = [(one.study, values_of(one, studies), one.phase) for one in row.columns]
    if any(values for _, values, _ in printed):
        here = "; ".join(f"{phase}, {values}" for _, values, phase in printed if values)
        names = dict.fromkeys(name for name, values, _ in printed if values)
        yield [*start, here, "", "no claim", _commands(list(names))]
        return
    state = row_status(row, claims, studies)
    words = {"cannot": f"needs {row.needs}", "scheme": "–", "drawn": "drawn on the study's page"}
    named = [*row.drawn, *(one.study for one in row.columns)]
    yield [*start, "", "", words.get(state, state), _commands(list(dict.fromkeys(named)))]


def _answer_cells(answer: Answer) -> list[str]:
    """here, difference, verdict, study."""
    claim = answer.claim
    said = claim.says if isinstance(claim, Claim) else claim.asks
    command = _commands([answer.study.name])
    if answer.entry is None:
        state = "not run yet" if not answer.study.compared else "not run yet with this claim"
        return [said, "", state, command]
    row = build_claim_row(answer.entry)
    other = f"`{claim.against_metric}` " if claim.against_metric else ""
    here = f"{said}: `{claim.metric}` {claim.method} {row.values[0]}, "
    here += f"{other}{claim.against} {row.values[1]}"
    difference = f"{row.difference}, no interval"
    if row.over:
        limits = row.difference_limits
        difference = f"{row.difference} [{limits}], over {row.over} ({row.counts})"
    words = VERDICTS | {"holds": "equivalent"} if claim.better == "equivalent" else VERDICTS
    if not isinstance(claim, Claim):
        words = VERDICTS | ANSWERS
    verdict = row.describe_verdict(words)
    return [here, difference, verdict + (" ‡" if answer.changed else ""), command]


def _others(papers: Mapping[str, Sequence[Row]], claims: Sequence[Answer]) -> list[str]:
    """Claims whose source is in no row."""
    known = {
        id(answer.claim)
        for name, row in _rows(papers)
        for answer in claims_in_row(row, name, claims)
    }
    rows = [
        [answer.claim.paper, answer.claim.source, *_answer_cells(answer)]
        for answer in claims
        if isinstance(answer.claim, Claim) and id(answer.claim) not in known
    ]
    head = ("paper", "where", "here", "difference", "verdict", "study")
    return ["## Claims of other sources", "", *markdown_table(head, rows), ""] if rows else []


def _questions(questions: Sequence[Answer]) -> list[str]:
    """What no paper claims."""
    if not questions:
        return []
    table = markdown_table(
        ("question", "difference", "answer", "study"), map(_answer_cells, questions)
    )
    return ["## What no paper claims, asked of these runs", "", *table, ""]


def _commands(studies: Sequence[str]) -> str:
    return "; ".join(f"`moecore study run pipelines/{name}`" for name in studies)
