"""The evaluated claims and questions for readers: tables of the page and a Markdown file."""

from collections.abc import Sequence

from moecore.report.claims.claim_row import ANSWERS, ClaimRow, build_claim_row
from moecore.report.claims.evaluation import Evaluated, claim_entry, claims_of, questions_of
from moecore.report.markdown import markdown_table
from moecore.report.page.view import Block, Grid, Item, Line, Section
from moecore.report.tables.number_format import NumberFormat, keep_percent_on_line
from moecore.study.reading.claims_section import Claim

MARKS = {"holds": "✓ holds", "differs": "✗ differs here", "open": "? open", "": "–"}
HOW = (
    "Difference: the claimed method minus the other, with its 95 % interval. "
    "It is paired by seed and by item, which is a test image, or a person where people have "
    "several; below it stands what the interval is over. A claim of a direction holds where the "
    "interval lies on its side, differs here where it lies on the other, and is open where it "
    "includes 0. A claim that two methods are equivalent within a margin holds where the 90 % "
    "interval lies within it (two one-sided tests at 5 %), and differs here where the 95 % "
    "interval lies wholly outside. “With Holm”: the same after Holm's correction over the claims "
    "of one paper. An open row tells the smallest difference that this design could have seen "
    "with 80 % power at 5 %: (t(0.975) + t(0.8)) · standard error. Data and sizes are not those "
    "of the papers."
)
HEAD = ("Verdict", "With Holm", "Difference", "Claimed", "Against", "Metric")
TITLE = "What the papers claim"
ASKED_HEAD = ("Answer", "Difference", "Of", "Against", "Metric")
ASKED = "What no paper claims, asked of these runs"


def claims_section(evaluated: Sequence[Evaluated]) -> Section:
    """Return the section of the page."""
    blocks = []
    if claims := claims_of(evaluated):
        grid = Grid(["Claim", *HEAD], [_page_line(one) for one in claims])
        blocks.append(Block("", grids=[grid]))
    if questions := questions_of(evaluated):
        grid = Grid(["Question", *ASKED_HEAD], [_page_line(one) for one in questions])
        blocks.append(Block(ASKED, grids=[grid]))
    title = TITLE if claims else ASKED
    return Section("claims", title, "Claims", [HOW], blocks)


def claims_markdown(evaluated: Sequence[Evaluated]) -> str:
    """Return the content of reports/claims.md."""
    if not evaluated:
        return f"# {TITLE}\n\nparams.yaml has no claims.\n"
    lines = [f"# {TITLE}", "", HOW]
    if claims := claims_of(evaluated):
        head = ("Paper", "Where", "It says", *HEAD)
        lines += ["", *markdown_table(head, map(_markdown_cells, claims))]
    if questions := questions_of(evaluated):
        head = ("Of", "It is asked", *ASKED_HEAD)
        lines += ["", f"## {ASKED}", "", *markdown_table(head, map(_markdown_cells, questions))]
    return "\n".join(lines) + "\n"


def _marks(evaluated_claim: Evaluated, row: ClaimRow) -> list[str]:
    """The verdict, and after Holm's correction; of a question its answer."""
    if isinstance(evaluated_claim.claim, Claim):
        return [MARKS[row.verdict], MARKS[row.verdict_holm]]
    return [ANSWERS.get(row.verdict, row.verdict)]


def _page_line(evaluated_claim: Evaluated) -> Line:
    claim = evaluated_claim.claim
    row = build_claim_row(claim_entry(evaluated_claim))
    mark, *corrected = _marks(evaluated_claim, row)
    detectable = row.detectable.replace(" pp", "\u00a0pp")
    over = row.over or "; ".join(row.notes)
    small = ", ".join(word for word in (row.difference_limits, over) if word)
    label, statement = _metric_words(evaluated_claim)
    items = [
        Item(mark, keep_percent_on_line(detectable), look=f"verdict {row.verdict}"),
        *(Item(text, look=f"verdict {row.verdict_holm}") for text in corrected),
        Item(row.difference, small),
        *map(Item, row.values, row.limits, (claim.method, claim.against)),
        Item(label, statement, note=claim.why),
    ]
    if isinstance(claim, Claim):
        return Line(Item(claim.paper, note=f"{claim.source}: {claim.says}"), items)
    return Line(Item(claim.paper or claim.asks, note=claim.asks if claim.paper else ""), items)


def _markdown_cells(evaluated_claim: Evaluated) -> list[str]:
    claim = evaluated_claim.claim
    row = build_claim_row(claim_entry(evaluated_claim))
    if isinstance(claim, Claim):
        start = [claim.paper, claim.source, claim.says]
    else:
        start = [claim.paper or "–", claim.asks]
    limits = f" [{row.difference_limits}]" if row.difference_limits else ""
    sides = [
        f"{method}: {value} [{span}]" if span else f"{method}: {value}"
        for method, value, span in zip(
            (claim.method, claim.against), row.values, row.limits, strict=True
        )
    ]
    label, statement = _metric_words(evaluated_claim)
    why = f" ({claim.why})" if claim.why else ""
    return [
        *start,
        *_marks(evaluated_claim, row),
        f"{row.difference}{limits}; {'; '.join(row.notes)}",
        *sides,
        f"{label} (`{claim.metric}`), {statement}{why}",
    ]


def _metric_words(evaluated_claim: Evaluated) -> tuple[str, str]:
    """The metric's name, and what is claimed or asked of it, where."""
    claim = evaluated_claim.claim
    column = evaluated_claim.metric.column
    verb = "claimed" if isinstance(claim, Claim) else "asked"
    statement = f"{claim.better} is {verb}"
    if claim.margin is not None:
        margin = NumberFormat(column.form).size(claim.margin)
        statement = f"equivalent within {margin} is {verb}"
    other = f" against {claim.against_metric}" if claim.against_metric else ""
    return column.label, f"{statement}{other}, {claim.phase}"
