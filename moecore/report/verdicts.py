"""The evaluated claims for readers: a table of the page and a Markdown file."""

from collections.abc import Sequence

from moecore.report.cells import Cell
from moecore.report.claims import Evaluated
from moecore.report.view import Block, Grid, Item, Line, Section
from moecore.report.words import between, decimals, limits_of, shown, signed

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
    places = decimals([found.difference], form)
    both = decimals([found.ours.interval, found.theirs.interval], form)
    span = _span(found) or "one seed"
    items = [
        Item(MARKS[found.verdict], look=f"verdict {found.verdict}"),
        Item(signed(found.difference.value, form, places), span),
        *(
            Item(shown(cell.interval.value, form, both), limits_of(cell, form, both), note=name)
            for name, cell in ((claim.method, found.ours), (claim.against, found.theirs))
        ),
        Item(found.metric.column.label, f"{claim.better} is claimed, {claim.phase}"),
    ]
    return Line(Item(claim.paper, note=claim.says), items)


def _words(found: Evaluated) -> list[str]:
    claim = found.claim
    form = found.metric.column.form
    both = decimals([found.ours.interval, found.theirs.interval], form)
    limits = f" [{_span(found)}]" if _span(found) else " (one seed)"
    label = found.metric.column.label
    words = [
        claim.paper,
        claim.says,
        MARKS[found.verdict],
        signed(found.difference.value, form, decimals([found.difference], form)) + limits,
        f"{claim.method}: {_plain(found.ours, form, both)}",
        f"{claim.against}: {_plain(found.theirs, form, both)}",
        f"{label} (`{claim.metric}`), {claim.better} is claimed, {claim.phase}",
    ]
    return [word.replace("|", "\\|").replace("\n", " ") for word in words]


def _plain(cell: Cell, form: str, places: int) -> str:
    limits = cell.interval.limits
    value = shown(cell.interval.value, form, places)
    return f"{value} [{between(*limits, form, places)}]" if limits else value


def _span(found: Evaluated) -> str:
    """The limits of the difference; "" of one seed."""
    form = found.metric.column.form
    edges = found.difference.limits or ()
    places = decimals([found.difference], form)
    return " to ".join(signed(edge, form, places).removesuffix(" pp") for edge in edges)
