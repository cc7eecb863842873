"""The four numbers that a person asks for first: score, score under attack, steadiness, cost."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from moecore.measure.robustness import Result as Robustness
from moecore.report.column import Column, key_of
from moecore.report.headlines import HEADLINES
from moecore.report.measured import Phase
from moecore.report.measures.robustness import WORST, attack_title, attacks_of, largest_epsilon
from moecore.report.tables.cells import Cell, Cells
from moecore.report.tables.comparison import Table
from moecore.report.tables.number_format import NumberFormat
from moecore.statistics.intervals import Interval

SWAPPED = "swapped_change_"


class Quantity(NamedTuple):
    """One number of every method that has it."""

    words: str  # what it is, within a sentence; of steadiness with a place for the values
    column: Column
    cells: Mapping[str, Cell]
    remains: bool = False  # shown is what is left of 1: of a change, what stays
    unit: str = ""  # of an error

    @property
    def format(self) -> NumberFormat:
        """How all its values are printed."""
        return NumberFormat.of(self.column.form, map(self.interval, self.cells))

    @property
    def leader(self) -> str | None:
        """The method that is better than every other, and not by chance."""
        return next((method for method, cell in self.cells.items() if cell.leads), None)

    def interval(self, method: str) -> Interval:
        """The value to be shown."""
        interval = self.cells[method].interval
        if not self.remains:
            return interval
        if interval.limits is None:
            return Interval(1 - interval.value)
        low, high = interval.limits
        return Interval(1 - interval.value, 1 - high, 1 - low)

    def told(self, values: str) -> str:
        """Its words with the values in their place."""
        return self.words.format(values)

    def ends(self) -> tuple[str, str]:
        """The methods with the smallest and the largest value."""
        values = {method: self.interval(method).value for method in self.cells}
        return min(values, key=lambda one: values[one]), max(values, key=lambda one: values[one])


class Quantities(NamedTuple):
    """Those of one phase; None for what was not measured."""

    score: Quantity | None
    attacked: Quantity | None
    steady: Quantity | None
    cost: Quantity | None
    text: bool = False  # which nothing attacks

    def missing(self, routed: bool) -> list[str]:
        """What the stages did not measure, and which of them would."""
        if self.text:
            return []
        wanted = {"the score under attack": (self.attacked, "robustness")}
        if routed:
            wanted["how steady the routing is"] = (self.steady, "robustness")
        return [
            f"Not measured: {words} (the stage {stage} would)."
            for words, (quantity, stage) in wanted.items()
            if quantity is None
        ]


SCORED = ("on clean test data", "under the worst attack", "under attack")


def quantities(phase: Phase, compared: Table, controls: Collection[str] = ()) -> Quantities:
    """Those of a phase, without its controls."""
    columns = {metric.name: metric.column for metric in compared.metrics}
    cells = {method: row for method, row in compared.cells.items() if method not in controls}
    if not cells:
        cells = compared.cells

    def named(name: str, words: str, remains: bool = False) -> Quantity | None:
        column = columns.get(name)
        if column is None:
            return None
        if remains:
            column = column._replace(form="share")
        having = of_column(name, cells)
        unit = phase.task.score.unit if words in SCORED else ""
        return Quantity(words, column, having, remains, unit) if having else None

    under, moved = attacked_names(phase)
    words = f"under {last_attack(phase)} routing overlap is {{}}"
    steady = named(moved, words, remains=True)
    swaps = [name for name in columns if name.startswith(SWAPPED)]
    if swaps:  # of most words
        part = columns[swaps[-1]].label.rpartition(", ")[2].removesuffix(" swapped")
        words = f"with {part} swapped routing overlap is {{}}"
        steady = steady or named(swaps[-1], words, remains=True)
    for one in HEADLINES:  # in order of preference
        if one.sentence:
            steady = steady or named(one.name, one.sentence, one.remains)
    return Quantities(
        named(f"test_{key_of(phase.task.score)}", SCORED[0]),
        named(under, SCORED[1] if under.endswith(WORST) else SCORED[2]),
        steady,
        named("gflops", "GFLOPs") or named("active_parameters", "active parameters"),
        phase.task.long,
    )


def of_column(name: str, cells: Cells) -> dict[str, Cell]:
    """method → its cell, of the methods that have one."""
    return {method: cell for method, row in cells.items() if (cell := row[name]) is not None}


def attacked_names(phase: Phase) -> tuple[str, str]:
    """The columns of the score under attack, and of the change of the routing; "" for none.

    Those of the worst case, or else of the last attack; the routing's is of the last attack.
    """
    results = phase.results(Robustness)
    attacks = names_of_attacks(phase)
    if not attacks:
        return "", ""
    worst = any(result.worst_case for result in results)
    shown = WORST if worst else attacks[-1]
    score = phase.task.score
    begins = "accuracy" if score.form == "share" else f"attacked_{score.name}"
    return f"{begins}_{shown}", f"routing_change_{attacks[-1]}"


def last_attack(phase: Phase) -> str:
    """Return PGD 10 (ε = 8/255)."""
    attacks = names_of_attacks(phase)
    if not attacks:
        return ""
    met = next(one for one in phase.results(Robustness) if attacks[-1] in attacks_of(one))
    return f"{attack_title(attacks[-1])} (ε\u00a0=\u00a0{largest_epsilon(met, attacks[-1])})"


def names_of_attacks(phase: Phase) -> list[str]:
    """The attacks that any model of the phase met."""
    results = phase.results(Robustness)
    return list(dict.fromkeys(name for result in results for name in attacks_of(result)))


def first_columns(phase: Phase, columns: Collection[str]) -> list[str]:
    """Return which of these columns a phase's first table has, and MLflow's parent runs, too.

    Under attack those of the worst case, or else of the last attack; of each kind of column about
    swapped words the last, of most words.
    """
    score, moved = attacked_names(phase)
    swapped = {}
    for name in columns if phase.task.long else ():
        if name.startswith(("swapped_ppl", SWAPPED)):
            swapped[name.split("_")[1]] = name
    names = [headline.name for headline in HEADLINES if headline.first]
    place = names.index("isolated_wm")
    shares = phase.task.score.form == "share"
    names[place:place] = [*swapped.values(), score, *([moved] if shares else [])]
    return [name for name in names if name in columns]
