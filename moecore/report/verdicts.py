"""The evaluated claims for readers: a table of the page and a Markdown file."""

from collections.abc import Sequence

from moecore.report.cells import Cell
from moecore.report.claims import Evaluated
from moecore.report.view import Block, Grid, Item, Line, Section
from moecore.report.words import between, limits_of, shown, signed

MARKS = {"holds": "✓ holds", "contradicted": "✗ contradicted", "open": "? open"}
HOW = (
    "Difference: the claimed method minus the other, paired by seed, with the 95 % interval of "
    "Student's t over seeds. A claim holds where the interval lies in the claimed direction, is "
    "contradicted where it lies in the other, and is open where it includes 0 or there is one "
    "seed. Each claim is evaluated by itself; data and sizes are not those of the papers."
)
HEAD = ("Verdict", "Difference", "Claimed", "Against", "Metric")
TITLE = "What the papers claim"


def claims_section(evaluated: Sequence[Evaluated]) -> Section:
    """The section of the page."""
    grid = Grid(["Claim", *HEAD], [_line(found) for found in evaluated])
    return Section("claims", TITLE, "Claims", [HOW], [Block("", grids=[grid])])


def claims_markdown(evaluated: Sequence[Evaluated]) -> str:
    """The content of reports/claims.md."""
    if not evaluated:
        return f"# {TITLE}\n\nparams.yaml has no claims.\n"
    head = ("Paper", "It says", *HEAD)
    rows = [head, ["---"] * len(head), *(_words(found) for found in evaluated)]
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"# {TITLE}\n\n{HOW}\n\n{lines}"


def _line(found: Evaluated) -> Line:
    claim = found.claim
    form = found.metric.column.form
    span = _span(found) or "one seed"
    items = [
        Item(MARKS[found.verdict], look=f"verdict {found.verdict}"),
        Item(signed(found.difference.value, form), span),
        *(
            Item(shown(cell.interval.value, form), limits_of(cell, form), note=name)
            for name, cell in ((claim.method, found.ours), (claim.against, found.theirs))
        ),
        Item(found.metric.column.label, f"{claim.better} is claimed, {claim.phase}"),
    ]
    return Line(Item(claim.paper, note=claim.says), items)


def _words(found: Evaluated) -> list[str]:
    claim = found.claim
    form = found.metric.column.form
    limits = f" [{_span(found)}]" if _span(found) else " (one seed)"
    label = found.metric.column.label
    words = [
        claim.paper,
        claim.says,
        MARKS[found.verdict],
        signed(found.difference.value, form) + limits,
        f"{claim.method}: {_plain(found.ours, form)}",
        f"{claim.against}: {_plain(found.theirs, form)}",
        f"{label} (`{claim.metric}`), {claim.better} is claimed, {claim.phase}",
    ]
    return [word.replace("|", "\\|").replace("\n", " ") for word in words]


def _plain(cell: Cell, form: str) -> str:
    limits = cell.interval.limits
    return shown(cell.interval.value, form) + (f" [{between(*limits, form)}]" if limits else "")


def _span(found: Evaluated) -> str:
    """The limits of the difference; "" of one seed."""
    form = found.metric.column.form
    edges = found.difference.limits or ()
    return " to ".join(signed(edge, form).removesuffix(" pp") for edge in edges)
