"""What a page shows, ready to be laid out: the templates know these and nothing else."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

WIDE = 7.0  # inches: a figure that is wider takes the whole width of the page


class PageCell(NamedTuple):
    """One cell of a table."""

    text: str
    small: str = ""  # limits, below the value
    note: str = ""
    look: str = ""  # a class of the style sheet
    share: float | None = None  # from 0 to 1: how deep the cell's colour is
    value: float | None = None  # what a reader sorts by; None where there is nothing to compare


NONE = PageCell("–", look="quiet")
EMPTY = PageCell("")


class TableRow(NamedTuple):
    """One row of a table; without items its head spans all columns."""

    head: PageCell
    items: Sequence[PageCell] = ()
    look: str = ""


class ColumnHead(NamedTuple):
    """What stands with a column's name."""

    title: str = ""  # shown while a pointer rests on it
    better: str = ""  # "higher", "lower", or "" where neither is better
    word: str = ""  # a key of glossary.WORDS that explains it
    notes: Sequence[str] = ()  # lines below the name


class PageTable(NamedTuple):
    """A table that scrolls by itself."""

    columns: Sequence[str]  # the first is that of the rows' heads; () for none
    lines: Sequence[TableRow]
    title: str = ""
    below: str = ""
    small: bool = False  # many narrow columns
    heads: Sequence[ColumnHead] = ()  # one a column, or () where their names say it all
    sortable: bool = False  # by any column
    short: str = ""  # the title where tables are chosen from
    more: Sequence[TableRow] = ()  # rows of words that are folded below it

    @property
    def named(self) -> Sequence[tuple[str, ColumnHead]]:
        """The columns' names with what stands with them."""
        heads = self.heads or [ColumnHead()] * len(self.columns)
        return list(zip(self.columns, heads, strict=True))

    @property
    def dense(self) -> bool:
        return len(self.lines) > 8

    @property
    def upright(self) -> bool:
        """Whether the columns' names stand upright: words do, numbers would be hard to read."""
        return self.small and any(len(name) > 2 for name in self.columns[1:])


class Picture(NamedTuple):
    """A figure of the page."""

    figure: Figure
    label: str  # for screen readers; unique in the page
    caption: str = ""

    @property
    def raster(self) -> bool:
        """Whether it is smaller as PNG than as SVG."""
        return getattr(self.figure, "raster", False)

    @property
    def wide(self) -> bool:
        """Whether its words would be too small in half of the page."""
        return self.figure.get_figwidth() > WIDE


class Block(NamedTuple):
    """One thing that a page says: words, tables, pictures, further words."""

    title: str
    words: Sequence[str] = ()
    grids: Sequence[PageTable] = ()
    pictures: Sequence[Picture] = ()
    tiles: Sequence[PageTable] = ()  # small tables side by side
    below: Sequence[str] = ()
    folded: bool = False  # shown once the reader asks for it
    marks: str = ""  # what the marks of its tables mean
    finding: str = ""  # what it found, in a line: all that is read of it while it is folded
    about: str = ""  # the column that its finding is of, where it has none of its own
    choice: bool = False  # one of the tables, or of the pictures, is shown at a time
    id: str = ""  # in the page; given by it

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.grids or self.pictures or self.tiles or self.below)


class Section(NamedTuple):
    """A part of the page that its head links to."""

    id: str
    title: str
    short: str  # in the head
    words: Sequence[str]
    blocks: Sequence[Block]


class PhaseOverviewCharts(NamedTuple):
    """The methods of one phase in a picture that is read in ten seconds."""

    id: str
    title: str
    pictures: Sequence[Picture]
    notes: Sequence[str]  # what was not measured, and what would


class Page(NamedTuple):
    """The whole page."""

    simulated: str  # names of simulated data; "" where there are none
    answer: str  # to the question that is its title
    opening: str
    overviews: Sequence[PhaseOverviewCharts]
    sections: Sequence[Section]
    facts: Sequence[PageTable]  # of the data
    settings: str  # the text of params.yaml
    words: Mapping[str, str]  # term → explanation
    explorer: str = ""  # address of the routing explorer; "" where there is none
