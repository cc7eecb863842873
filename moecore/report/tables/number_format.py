"""Entries of tables, and numbers for readers: as many digits as the interval around them bears out.

A column has one number of decimals and one notation; 4.76e-04 never stands beside 0.000.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from moecore.report.column import Metric
from moecore.report.measured import Measured
from moecore.statistics.intervals import Interval, over_seeds


class Cell(NamedTuple):
    """One entry of the table."""

    interval: Interval
    kind: str  # of its limits: t, wilson, bootstrap, quartiles or "" for none
    seeds: int
    # Better than every other method of its column but controls, and not by chance.
    leads: bool = False
    # Shown as the best: it leads, and is no model without experts that the others are held against.
    marked: bool = False


Cells = Mapping[str, Mapping[str, Cell | None]]  # method → metric → cell


def cell(metric: Metric, models: Sequence[Measured]) -> Cell | None:
    """Mean over seeds with Student's interval; one seed has the metric's own interval, if any."""
    read = [metric.read(model) for model in models]
    known = [found for found in read if found is not None]
    if len(known) < len(read):
        return None
    if len(known) == 1:
        return Cell(known[0], metric.column.limits if known[0].limits else "", 1)
    found = over_seeds([interval.value for interval in known])
    if metric.column.form == "share" and found.limits:
        low, high = found.limits
        found = Interval(found.value, max(0.0, low), min(1.0, high))
    return Cell(found, "t", len(known))


def as_json(found: Cell) -> dict[str, Any]:
    """mean, low, high, interval (its kind) and seeds; without limits where there are none."""
    value, low, high = found.interval
    if not found.kind:
        return {"mean": value, "seeds": found.seeds}
    return {"mean": value, "low": low, "high": high, "interval": found.kind, "seeds": found.seeds}


SCALES = {"share": 100.0, "bytes": 2.0**-20}  # from the unit of a result to that of the page
UNITS = {"share": " %", "bytes": " MiB"}
MOST = {"share": 2, "number": 6, "bytes": 1}  # decimals; other forms have none
OF_WIDTH = 2  # figures of an interval's half width that are printed
OF_VALUE = 3  # figures of a value without an interval
NOTHING = 1e-9  # a half width below it is rounding: every seed is alike
MINUS = "−"
PIXEL = 255  # steps of a pixel's value in a picture file


def decimals(found: Iterable[Interval], form: str) -> int:
    """How many decimals a column of these values has.

    Two figures of the half width that is in the middle of all; where no value has an interval,
    three figures of the value in the middle, and of shares one decimal.
    """
    if form not in MOST:
        return 0
    values = list(found)
    widths = [value.limits for value in values]
    halves = [(high - low) / 2 for low, high in (limits for limits in widths if limits)]
    scale = SCALES.get(form, 1.0)
    wide = [half * scale for half in halves if half * scale > NOTHING]
    if wide:
        return _places(median_low(wide), OF_WIDTH, MOST[form])
    if form != "number":
        return 1
    sizes = [abs(value.value) for value in values if value.value]
    return _places(median_low(sizes), OF_VALUE, MOST[form]) if sizes else 1


def _places(size: float, figures: int, most: int) -> int:
    """Decimals that print so many figures of a number of this size."""
    return min(most, max(0, figures - 1 - math.floor(math.log10(size))))


def shown(value: float, form: str, places: int | None = None) -> str:
    """share 0.912 → 91.2 %, count 12345 → 12,345, seconds 75 → 1 min 15 s, bytes → MiB.

    places: the decimals of its column; of a number that stands alone those of ``decimals``. What
    they would print as 0, but is none, is "< 0.001".
    """
    if form == "seconds":
        return duration(round(value))
    if places is None:
        places = decimals([Interval(value)], form)
    number = _number(value * SCALES.get(form, 1.0), places)
    if 0 < value and not re.search("[1-9]", number):
        number = f"< {10**-places:.{places}f}"
    return number + UNITS.get(form, "")


def _number(value: float, places: int) -> str:
    """With a real minus, and without one before 0."""
    text = f"{value:,.{places}f}"
    negative = text.startswith("-") and re.search("[1-9]", text)
    return (MINUS if negative else "") + text.removeprefix("-")


def duration(seconds: int) -> str:
    """3725 → 1 h 02 min."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {seconds:02d} s"
    return f"{seconds} s"


def signed(value: float, form: str, places: int | None = None) -> str:
    """A difference with its sign; shares in percentage points."""
    if places is None:
        places = decimals([Interval(value)], form)
    if form == "seconds":
        text = duration(abs(round(value)))
    else:
        text = _number(abs(value) * SCALES.get(form, 1.0), places)
    unit = {"share": " pp", "bytes": " MiB"}.get(form, "")
    if not re.search("[1-9]", text):
        return f"±{text}{unit}"
    return ("+" if value > 0 else MINUS) + text + unit


def between(low: float, high: float, form: str, places: int | None = None) -> str:
    """The limits of an interval, such as 90.5 – 91.9, without a unit."""
    if form == "seconds":
        return f"{duration(round(low))} – {duration(round(high))}"
    if places is None:
        places = decimals([Interval((low + high) / 2, low, high)], form)
    scale = SCALES.get(form, 1.0)
    return f"{_number(low * scale, places)} – {_number(high * scale, places)}"


def limits_of(cell: Cell, form: str, places: int | None = None) -> str:
    """The limits of a cell; "" where it has none, or where every seed has the same count."""
    limits = cell.interval.limits
    if limits is None or (form == "count" and limits[0] == limits[1]):
        return ""
    return between(*limits, form, places)


def epsilon(value: float) -> str:
    """How far an attack may move a pixel: 8/255 where it is such a fraction, else 0.05."""
    steps = value * PIXEL
    if abs(steps - round(steps)) < 1e-3:
        return f"{round(steps)}/{PIXEL}"
    return f"{value:.3g}"


def unbroken(text: str) -> str:
    """The same words, in which no line begins with a percent sign or ends with "ε ="."""
    return re.sub(" %| = ", lambda found: found[0].replace(" ", "\u00a0"), text)


def with_named_epsilons(text: str) -> str:
    """The same words with every ``ε = 0.0313725`` as ``ε = 8/255``."""
    return re.sub(r"ε = (\d*\.\d+)", lambda found: f"ε = {epsilon(float(found[1]))}", text)


WORDS = {
    "mixture of experts": "a layer with several small networks, the experts, of which each token "
    "uses only a few",
    "router": "the part of such a layer that decides which experts see a token; a token stands for "
    "one patch of the image",
    "worst case": "an image counts as right only if no attack broke it; of errors the largest one "
    "over all attacks counts",
    "load CV²": "how unevenly the experts are used: variance / mean² of the tokens per expert; 0 "
    "where all get the same",
    "agreement": "the share of tokens whose first expert is the same in two looks: at two epochs, "
    "before and after fine-tuning, or by student and teacher",
    "IMED": "image Euclidean distance: how far a router's outputs move when the image is rotated, "
    "scaled, sheared or shifted; 0 where they stay",
    "mCE": "mean corruption error: errors under noise, blur, weather and the like as a share of "
    "the dense model's; below 1 is better than dense",
}  # in the order in which a reader meets them

# How the names of columns begin or end → the word that explains them.
BEGINNINGS = {
    "agreement_": "agreement",
    "teacher_agreement": "agreement",
    "imed": "IMED",
    "load_cv2": "load CV²",
    "mce": "mCE",
}
ENDINGS = {"_worst_case": "worst case"}


def word_of(column: str) -> str:
    """The key of WORDS that explains a column, by the column's name; "" where none does."""
    for beginning, word in BEGINNINGS.items():
        if column.startswith(beginning):
            return word
    for ending, word in ENDINGS.items():
        if column.endswith(ending):
            return word
    return ""
