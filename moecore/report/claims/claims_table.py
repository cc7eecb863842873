"""The evaluated claims and questions for readers: tables of the page and a Markdown file."""

from collections.abc import Sequence

from moecore.report.claims.evaluation import Evaluated, claims_of, questions_of
from moecore.report.page.view import Block, Grid, Item, Line, Section
from moecore.report.tables.number_format import Cell, between, decimals, limits_of, shown, signed
from moecore.report.tables.summary import ANSWERS
from moecore.statistics.crossed import BOTH, ITEMS, SEEDS
from moecore.study.selection import Claim, Question

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
OVER = {
    BOTH: "over items and seeds",
    ITEMS: "over items, given this one seed",
    SEEDS: "over seeds alone: the metric has no items",
    "": "no interval: all items are alike",
}
HEAD = ("Verdict", "With Holm", "Difference", "Claimed", "Against", "Metric")
TITLE = "What the papers claim"
ASKED_HEAD = ("Answer", "Difference", "Of", "Against", "Metric")
ASKED = "What no paper claims, asked of these runs"


def claims_section(evaluated: Sequence[Evaluated]) -> Section:
    """The section of the page."""
    blocks = []
    if claims := claims_of(evaluated):
        grid = Grid(["Claim", *HEAD], [_line(found) for found in claims])
        blocks.append(Block("", grids=[grid]))
    if questions := questions_of(evaluated):
        grid = Grid(["Question", *ASKED_HEAD], [_line(found) for found in questions])
        blocks.append(Block(ASKED, grids=[grid]))
    title = TITLE if claims_of(evaluated) else ASKED
    return Section("claims", title, "Claims", [HOW], blocks)


def claims_markdown(evaluated: Sequence[Evaluated]) -> str:
    """The content of reports/claims.md."""
    if not evaluated:
        return f"# {TITLE}\n\nparams.yaml has no claims.\n"
    text = f"# {TITLE}\n\n{HOW}\n"
    if claims := claims_of(evaluated):
        text += f"\n{_table(('Paper', 'Where', 'It says', *HEAD), claims)}"
    if questions := questions_of(evaluated):
        text += f"\n## {ASKED}\n\n{_table(('Of', 'It is asked', *ASKED_HEAD), questions)}"
    return text


def _table(head: Sequence[str], rows: Sequence[Evaluated]) -> str:
    lines = [head, ["---"] * len(head), *(_words(found) for found in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _marks(found: Evaluated) -> list[str]:
    """The verdict, and after Holm's correction; of a question its answer."""
    if isinstance(found.claim, Claim):
        return [MARKS[found.verdict], MARKS[found.verdict_holm]]
    return [ANSWERS.get(found.verdict, found.verdict)]


def _line(found: Evaluated) -> Line:
    claim = found.claim
    form = found.metric.column.form
    both = decimals([found.ours.interval, found.theirs.interval], form)
    mark, *corrected = _marks(found)
    items = [
        Item(mark, _seen(found), look=f"verdict {found.verdict}"),
        *(Item(one, look=f"verdict {found.verdict_holm}") for one in corrected),
        Item(_value(found), ", ".join(word for word in (_span(found), _over(found)) if word)),
        *(
            Item(shown(cell.interval.value, form, both), limits_of(cell, form, both), note=name)
            for name, cell in ((claim.method, found.ours), (claim.against, found.theirs))
        ),
        Item(
            found.metric.column.label,
            f"{_said(found)}{_other(claim)}, {claim.phase}",
            note=claim.why,
        ),
    ]
    if isinstance(claim, Claim):
        return Line(Item(claim.paper, note=f"{claim.source}: {claim.says}"), items)
    return Line(Item(claim.paper or claim.asks, note=claim.asks if claim.paper else ""), items)


def _words(found: Evaluated) -> list[str]:
    claim = found.claim
    form = found.metric.column.form
    both = decimals([found.ours.interval, found.theirs.interval], form)
    limits = f" [{_span(found)}]" if _span(found) else ""
    if isinstance(claim, Claim):
        start = [claim.paper, claim.source, claim.says]
    else:
        start = [claim.paper or "–", claim.asks]
    label = found.metric.column.label
    why = f" ({claim.why})" if claim.why else ""
    words = [
        *start,
        *_marks(found),
        f"{_value(found)}{limits}; {'; '.join(_notes(found))}",
        f"{claim.method}: {_plain(found.ours, form, both)}",
        f"{claim.against}: {_plain(found.theirs, form, both)}",
        f"{label} (`{claim.metric}`){_other(claim)}, {_said(found)}{why}, {claim.phase}",
    ]
    return [word.replace("|", "\\|").replace("\n", " ") for word in words]


def _other(claim: Claim | Question) -> str:
    """The metric of the other side, where it is another one."""
    return f" against {claim.against_metric}" if claim.against_metric else ""


def _said(found: Evaluated) -> str:
    """What is claimed, or asked, of the metric."""
    claim = found.claim
    verb = "claimed" if isinstance(claim, Claim) else "asked"
    if claim.margin is None:
        return f"{claim.better} is {verb}"
    margin = signed(claim.margin, found.metric.column.form).removeprefix("+")
    return f"equivalent within {margin} is {verb}"


def _notes(found: Evaluated) -> list[str]:
    """What the interval is over; of an open row what could have been seen."""
    difference = found.difference
    if difference.kind == "" and not difference.items:
        return ["one seed, no interval"]
    return [note for note in (OVER[difference.kind], _seen(found)) if note]


def _over(found: Evaluated) -> str:
    """The same in a word or two."""
    return found.difference.kind or "; ".join(_notes(found))


def _seen(found: Evaluated) -> str:
    """Of an open row the smallest difference that could have been seen, else nothing."""
    if found.smallest is None:
        return ""
    form = found.metric.column.form
    places = decimals([found.difference.interval()], form)
    smallest = signed(found.smallest, form, places).removeprefix("+")
    return f"could have seen {smallest}".replace(" pp", "\u00a0pp")


def _value(found: Evaluated) -> str:
    form = found.metric.column.form
    return signed(found.difference.value, form, decimals([found.difference.interval()], form))


def _plain(cell: Cell, form: str, places: int) -> str:
    limits = cell.interval.limits
    value = shown(cell.interval.value, form, places)
    return f"{value} [{between(*limits, form, places)}]" if limits else value


def _span(found: Evaluated) -> str:
    """The limits of the difference; "" without an interval."""
    form = found.metric.column.form
    interval = found.difference.interval()
    places = decimals([interval], form)
    edges = interval.limits or ()
    return " to ".join(signed(edge, form, places).removesuffix(" pp") for edge in edges)
