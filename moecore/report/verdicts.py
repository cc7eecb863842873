"""The judged claims for readers: a table of the page and a Markdown file."""

from collections.abc import Sequence
from html import escape

from moecore.report.claims import Judged
from moecore.report.markup import between, shown, signed, table_of, with_limits
from moecore.report.tables import Cell

MARKS = {"holds": "✓ holds", "contradicted": "✗ contradicted", "open": "? open"}
HOW = (
    "Difference: the claimed method minus the other, paired by seed, with the 95 % interval of Student's t over seeds. A claim holds where the "
    "interval lies in the claimed direction, is contradicted where it lies in the other, and is open where it includes 0 or there is one seed. "
    "Each claim is judged by itself; data and sizes are not those of the papers."
)
HEAD = ("Verdict", "Difference", "Claimed", "Against", "Metric")


def claims_section(judged: Sequence[Judged]) -> str:
    """The section of the page; nothing where there are no claims."""
    if not judged:
        return ""
    head = ["<th>Claim</th>", *(f"<th>{name}</th>" for name in HEAD)]
    rows = [_row(found) for found in judged]
    return f'<section id="claims"><h2>What the papers claim</h2><p class="quiet">{HOW}</p>{table_of(head, rows)}</section>'


def claims_markdown(judged: Sequence[Judged]) -> str:
    """The content of reports/claims.md."""
    if not judged:
        return "# What the papers claim\n\nparams.yaml has no claims.\n"
    head = ("Paper", "It says", *HEAD)
    lines = [head, ["---"] * len(head), *(_words(found) for found in judged)]
    return f"# What the papers claim\n\n{HOW}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(found: Judged) -> list[str]:
    claim, form = found.claim, found.metric.form
    limits = f'<span class="limits">{_span(found)}</span>' if found.difference.low is not None else '<span class="limits">one seed</span>'
    sides = ((claim.method, found.ours), (claim.against, found.theirs))
    return [
        f'<th scope="row">{escape(claim.paper)}<span class="note">{escape(claim.says)}</span></th>',
        f'<td class="verdict {found.verdict}">{MARKS[found.verdict]}</td>',
        f"<td>{signed(found.difference.value, form)}{limits}</td>",
        *(f'<td><span class="note">{escape(name)}</span>{with_limits(cell, form)}</td>' for name, cell in sides),
        f'<td>{escape(found.metric.label)}<span class="limits">{claim.better} is claimed, {claim.phase}</span></td>',
    ]


def _words(found: Judged) -> list[str]:
    claim, form = found.claim, found.metric.form
    limits = f" [{_span(found)}]" if found.difference.low is not None else " (one seed)"
    sides = [f"{name}: {_plain(cell, form)}" for name, cell in ((claim.method, found.ours), (claim.against, found.theirs))]
    what = f"{found.metric.label} (`{claim.metric}`), {claim.better} is claimed, {claim.phase}"
    words = [claim.paper, claim.says, MARKS[found.verdict], signed(found.difference.value, form) + limits, *sides, what]
    return [word.replace("|", "\\|").replace("\n", " ") for word in words]


def _plain(cell: Cell, form: str) -> str:
    value, low, high = cell.interval
    return shown(value, form) + (f" [{between(low, high, form)}]" if low is not None else "")


def _span(found: Judged) -> str:
    low, high = (signed(value, found.metric.form).removesuffix(" pp") for value in found.difference[1:])
    return f"{low} to {high}"
