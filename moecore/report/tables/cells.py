"""Table cells and number formats: as many digits as the intervals of a column support.

Numbers that papers print are shown next to ours, never compared.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import yaml

from moecore.core.source_layout import SHIPPED
from moecore.report.column import Column
from moecore.report.result_types import ModelResults, Models, list_without_none
from moecore.statistics.comparisons import OVER_ITEMS_AND_SEEDS, crossed_difference
from moecore.statistics.intervals import Interval, mean_over_seed_pairs, mean_over_seeds
from moecore.study import papers

SCALES = {"share": 100.0, "bytes": 2.0**-20}  # page's unit (%, MiB) per unit of a result
UNIT_SUFFIXES = {"share": " %", "bytes": " MiB"}
MAX_DECIMALS = {"share": 2, "number": 6, "bytes": 1}  # other forms have none
WIDTH_SIGNIFICANT_DIGITS = 2  # significant figures of an interval's half-width
VALUE_SIGNIFICANT_DIGITS = 3  # significant figures of a value without an interval
ROUNDING_WIDTH = 1e-9  # a smaller half width is rounding: the seeds are identical
MINUS = "−"
PIXEL = 255  # steps of a pixel's value in a picture file


class NumberFormat(NamedTuple):
    form: str = "number"
    places: int | None = None  # decimals; None: each number has its own

    @classmethod
    def of(cls, form: str, intervals: Iterable[Interval]) -> "NumberFormat":
        """Return the format with equal decimals for all values of a column."""
        # Two figures of the median half width; without intervals, three figures of the median
        # value, and one decimal of shares.
        if form not in MAX_DECIMALS:
            return cls(form, 0)
        intervals = list(intervals)
        scale = SCALES.get(form, 1.0)
        limits = [interval.limits for interval in intervals if interval.limits]
        halves = [(high - low) / 2 * scale for low, high in limits]
        if wide := [half for half in halves if half > ROUNDING_WIDTH]:
            return cls(form, count_decimals(median_low(wide), WIDTH_SIGNIFICANT_DIGITS, form))
        sizes = [abs(interval.value) for interval in intervals if interval.value]
        if form != "number" or not sizes:
            return cls(form, 1)
        return cls(form, count_decimals(median_low(sizes), VALUE_SIGNIFICANT_DIGITS, form))

    def value(self, number: float) -> str:
        """Return a value as text with its unit: 91.2 % for the share 0.912, 3.0 MiB, 1 min 15 s."""
        # A positive number that would be printed as 0 is "< 0.001".
        text = self._text(number)
        if 0 < number and not text.strip("0."):
            text = f"< {text[:-1]}1"
        return text + UNIT_SUFFIXES.get(self.form, "")

    def difference(self, number: float) -> str:
        """Return a difference as text with its sign; shares are in percentage points (pp)."""
        text = self._text(abs(number))
        unit = {"share": " pp", "bytes": " MiB"}.get(self.form, "")
        if not re.search("[1-9]", text):
            return f"±{text}{unit}"
        return ("+" if number > 0 else MINUS) + text + unit

    def magnitude(self, number: float) -> str:
        return self.difference(number).lstrip(f"+{MINUS}±")

    def interval(self, low: float, high: float) -> str:
        """Return two limits as text without a unit, such as 90.5 – 91.9."""
        both = Interval((low + high) / 2, low, high)
        return f"{self._text(low, both)} – {self._text(high, both)}"

    def limits(self, interval: Interval) -> str:
        """Return an interval's limits as text; "" without limits, or if a count's two are equal."""
        limits = interval.limits
        if limits is None or (self.form == "count" and limits[0] == limits[1]):
            return ""
        return self.interval(*limits)

    def value_with_limits(self, interval: Interval, brackets: str = "[]") -> str:
        """Return value and limits as text: 79.1 % [76.0 – 82.2]."""
        text = self.value(interval.value)
        if limits := self.limits(interval):
            text += f" {brackets[0]}{limits}{brackets[1]}"
        return text

    def difference_limits(self, interval: Interval) -> str:
        edges = interval.limits or ()
        return " to ".join(self.difference(edge).removesuffix(" pp") for edge in edges)

    def _text(self, number: float, within: Interval | None = None) -> str:
        """Return a number as text, no unit, typographic minus; ``within``'s width sets decimals."""
        # within: interval whose width sets the decimals if the format has none.
        if self.form == "seconds":
            return format_duration(round(number))
        places = self.places
        if places is None:
            places = self.of(self.form, [within or Interval(number)]).places
        text = f"{number * SCALES.get(self.form, 1.0):,.{places}f}"
        if re.search("[1-9]", text):
            return text.replace("-", MINUS)
        return text.removeprefix("-")


def count_decimals(size: float, figures: int, form: str) -> int:
    return min(MAX_DECIMALS[form], max(0, figures - 1 - math.floor(math.log10(size))))


def format_duration(seconds: int) -> str:
    """Return a duration as text, such as 1 h 02 min for 3725."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {seconds:02d} s"
    return f"{seconds} s"


def format_epsilon(value: float) -> str:
    """Return an attack's radius as text: 8/255 for whole steps of a pixel, else such as 0.05."""
    steps = value * PIXEL
    if abs(steps - round(steps)) < 1e-3:
        return f"{round(steps)}/{PIXEL}"
    return f"{value:.3g}"


def pluralize(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def join_names(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def keep_percent_on_line(text: str) -> str:
    return re.sub(" %| = ", lambda match: match[0].replace(" ", "\u00a0"), text)


def format_epsilons_in_text(text: str) -> str:
    """Return the text with every ``ε = 0.0313725`` replaced by ``ε = 8/255``."""
    return re.sub(r"ε = (\d*\.\d+)", lambda match: f"ε = {format_epsilon(float(match[1]))}", text)


class Cell(NamedTuple):
    """One value in the table of methods and metrics, with its interval."""

    interval: Interval
    kind: str  # of its limits: OVER_ITEMS_AND_SEEDS, t, jackknife, wilson, …; "" for none
    seeds: int
    # Significantly better than every other method of its column; controls are ignored.
    leads: bool = False
    # Shown as the best: it leads and, in a study of experts, has a router.
    marked: bool = False


Cells = Mapping[str, Mapping[str, Cell | None]]  # method → metric → cell


def cell_over_seeds(metric: Column, models: Sequence[ModelResults]) -> Cell | None:
    """Return a metric's mean over a method's seeds, with interval; None if any seed lacks it."""
    # The interval is over items and seeds, or Student's over seeds if they do not store equally
    # many items, at least two; there is none if a value is a bound. One seed has the metric's own
    # interval, if any; a metric of pairs of seeds has the mean over pairs.
    if metric.of_pairs:
        pairs = metric.pair_values(models)
        if pairs is None:
            return None
        mean = mean_over_seed_pairs(pairs)  # of two seeds without an interval
        return Cell(mean, "jackknife" if mean.limits else "", len(models))
    intervals = [interval for model in models if (interval := metric.read(model)) is not None]
    if len(intervals) < len(models):
        return None
    if len(intervals) == 1:
        return Cell(intervals[0], metric.limits if intervals[0].limits else "", 1)
    mean = mean_over_seeds([interval.value for interval in intervals])
    kind = "t"
    if metric.has_bound(models):
        return Cell(Interval(mean.value), "", len(intervals))
    items = list_without_none(metric.items(model) for model in models)
    counts = {len(values) for values in items}
    has_items = len(items) == len(models) and len(counts) == 1 and counts != {1}
    if has_items and (half := crossed_difference(np.stack(items)).half_width()):
        mean = Interval(mean.value, mean.value - half, mean.value + half)
        kind = OVER_ITEMS_AND_SEEDS
    if metric.form == "share" and mean.limits:
        low, high = mean.limits
        mean = Interval(mean.value, max(0.0, low), min(1.0, high))
    return Cell(mean, kind, len(intervals))


def method_cells_over_seeds(metric: Column, models: Models) -> dict[str, Cell | None]:
    return {name: cell_over_seeds(metric, list(seeds.values())) for name, seeds in models.items()}


def cell_to_json(cell: Cell, form: str) -> dict[str, Any]:
    """Return the cell as an entry of compare.json: mean, seeds, form and, if any, its limits."""
    value, low, high = cell.interval
    entry = {"mean": value, "low": low, "high": high, "interval": cell.kind}
    if not cell.kind:
        entry = {"mean": value}
    return entry | {"seeds": cell.seeds, "form": form}


def interval_from_json(cell: Mapping[str, Any]) -> Interval:
    return Interval(cell["mean"], cell.get("low"), cell.get("high"))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rules = ["---"] * len(head)
    texts = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, rules, *rows))
    return [f"| {text} |".replace("\n", " ") for text in texts]


class PaperModelNumbers(NamedTuple):
    paper: str  # a key of TITLES
    model: str
    source: str
    values: dict[str, float]  # name of our metric → number that the paper reports
    printed_in: str = ""  # name of the paper, as in its claims


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PAPER_FILES = {
    name: yaml.load(papers.find_paper_file(SHIPPED, name).read_text(encoding="utf-8"), _LOADER)
    for name in papers.PAPER_FOLDERS
}
_COST_TITLE = "Cost of a trained model (ERMoE, tables S2, S4, §12; MoGE, table 6)"
_OTHER_TABLES = {  # tables of a page that no single paper has
    "corruptions": {"title": "Common corruptions", "short": "Corruptions"},
    "cost": {"title": _COST_TITLE, "short": "Cost"},
    "ages": {
        "title": "ERMoE-ba: age from brain scans (supplement §5, table S1)",
        "short": "Brain age",
        "note": "ADNI holds scans of people; errors on other data, simulated ones above all, "
        "cannot be compared with the paper's in height.",
    },
}
_ALL_TABLES = _PAPER_FILES | _OTHER_TABLES
TITLES: dict[str, str] = {name: paper["title"] for name, paper in _ALL_TABLES.items()}
SHORT_TITLES: dict[str, str] = {name: paper["short"] for name, paper in _ALL_TABLES.items()}
NOTES: dict[str, str] = {name: paper.get("note", "") for name, paper in _ALL_TABLES.items()}
REPORTED_MODELS = tuple(
    PaperModelNumbers(
        table.get("page", paper),
        model,
        table["source"],
        {
            metric: float(value)
            for metric, value in zip(table["metrics"], values, strict=True)
            if value is not None
        },
        _PAPER_FILES[paper]["name"],
    )
    for paper, entries in _PAPER_FILES.items()
    for table in entries["numbers"]
    for model, values in table["models"].items()
)
REPORTED_COSTS = {model.model: model for model in REPORTED_MODELS if model.paper == "cost"}
