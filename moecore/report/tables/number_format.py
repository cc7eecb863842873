"""Numbers for readers: as many digits as the interval around them bears out.

A column has one number of decimals and one notation; 4.76e-04 never stands beside 0.000.
"""

import math
import re
from collections.abc import Iterable
from statistics import median_low
from typing import NamedTuple

from moecore.statistics.intervals import Interval

SCALES = {"share": 100.0, "bytes": 2.0**-20}  # from the unit of a result to that of the page
UNITS = {"share": " %", "bytes": " MiB"}
MOST_DECIMALS = {"share": 2, "number": 6, "bytes": 1}  # other forms have none
OF_WIDTH = 2  # figures of an interval's half width that are printed
OF_VALUE = 3  # figures of a value without an interval
ROUNDING_WIDTH = 1e-9  # a half width below it is rounding: every seed is alike
MINUS = "−"
PIXEL = 255  # steps of a pixel's value in a picture file


class NumberFormat(NamedTuple):
    """How the numbers of a column are printed: share, count, seconds, bytes or number."""

    form: str = "number"
    places: int | None = None  # decimals; None: each number has its own

    @classmethod
    def of(cls, form: str, intervals: Iterable[Interval]) -> "NumberFormat":
        """Return the format of a column with these values.

        Two figures of the half width that is in the middle of all; where no value has an interval,
        three figures of the value in the middle, and of shares one decimal.
        """
        if form not in MOST_DECIMALS:
            return cls(form, 0)
        intervals = list(intervals)
        scale = SCALES.get(form, 1.0)
        limits = [interval.limits for interval in intervals if interval.limits]
        halves = [(high - low) / 2 * scale for low, high in limits]
        if wide := [half for half in halves if half > ROUNDING_WIDTH]:
            return cls(form, count_decimals(median_low(wide), OF_WIDTH, form))
        sizes = [abs(interval.value) for interval in intervals if interval.value]
        if form != "number" or not sizes:
            return cls(form, 1)
        return cls(form, count_decimals(median_low(sizes), OF_VALUE, form))

    def value(self, number: float) -> str:
        """Return 91.2 % for the share 0.912, 12,345, 1 min 15 s for 75 seconds, or 3.0 MiB.

        What would be printed as 0, but is none, is "< 0.001".
        """
        text = self._text(number)
        if 0 < number and not text.strip("0."):
            text = f"< {text[:-1]}1"
        return text + UNITS.get(self.form, "")

    def difference(self, number: float) -> str:
        """Return a difference with its sign; shares in percentage points."""
        text = self._text(abs(number))
        unit = {"share": " pp", "bytes": " MiB"}.get(self.form, "")
        if not re.search("[1-9]", text):
            return f"±{text}{unit}"
        return ("+" if number > 0 else MINUS) + text + unit

    def size(self, number: float) -> str:
        """Return a difference without its sign."""
        return self.difference(number).lstrip(f"+{MINUS}±")

    def interval(self, low: float, high: float) -> str:
        """Return limits, such as 90.5 – 91.9, without a unit."""
        both = Interval((low + high) / 2, low, high)
        return f"{self._text(low, both)} – {self._text(high, both)}"

    def limits(self, interval: Interval) -> str:
        """Return its limits; "" where it has none, or where every seed has the same count."""
        limits = interval.limits
        if limits is None or (self.form == "count" and limits[0] == limits[1]):
            return ""
        return self.interval(*limits)

    def value_with_limits(self, interval: Interval, brackets: str = "[]") -> str:
        """Return 79.1 % [76.0 – 82.2], or the value alone."""
        limits = self.limits(interval)
        text = self.value(interval.value)
        if limits:
            text += f" {brackets[0]}{limits}{brackets[1]}"
        return text

    def difference_limits(self, interval: Interval) -> str:
        """Return the limits of a difference, such as −0.6 to +1.7; "" where it has none."""
        edges = interval.limits or ()
        return " to ".join(self.difference(edge).removesuffix(" pp") for edge in edges)

    def _text(self, number: float, within: Interval | None = None) -> str:
        """Return a number without its unit, with a real minus, and without one before 0."""
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
    """Return the decimals that print so many figures of a number of this size."""
    return min(MOST_DECIMALS[form], max(0, figures - 1 - math.floor(math.log10(size))))


def format_duration(seconds: int) -> str:
    """Return 1 h 02 min for 3725."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {seconds:02d} s"
    return f"{seconds} s"


def format_epsilon(value: float) -> str:
    """Return how far an attack may move a pixel: 8/255 where it is such a fraction, else 0.05."""
    steps = value * PIXEL
    if abs(steps - round(steps)) < 1e-3:
        return f"{round(steps)}/{PIXEL}"
    return f"{value:.3g}"


def keep_percent_on_line(text: str) -> str:
    """Return the same words, in which no line begins with a percent sign or ends with "ε ="."""
    return re.sub(" %| = ", lambda match: match[0].replace(" ", "\u00a0"), text)


def shorten_epsilons(text: str) -> str:
    """Return the same words with every ``ε = 0.0313725`` as ``ε = 8/255``."""
    return re.sub(r"ε = (\d*\.\d+)", lambda match: f"ε = {format_epsilon(float(match[1]))}", text)
