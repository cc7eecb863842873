"""Numbers for readers."""

from moecore.report.cells import Cell


def shown(value: float, form: str) -> str:
    """share 0.912 → 91.2 %, count 12345 → 12,345, seconds 75 → 1 min 15 s, bytes → MiB.

    Any other number has three decimals, none from 1000 on, and three figures where it is tiny or
    huge.
    """
    match form:
        case "share":
            return f"{value * 100:.1f} %"
        case "count":
            return f"{value:,.0f}"
        case "seconds":
            return duration(round(value))
        case "bytes":
            return f"{value / 2**20:,.1f} MiB"
    size = abs(value)
    if size == 0 or 0.0005 <= size < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= size < 1e6 else f"{value:.2e}"


def duration(seconds: int) -> str:
    """3725 → 1 h 02 min."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {seconds:02d} s"
    return f"{seconds} s"


def signed(value: float, form: str) -> str:
    """A difference with its sign; shares in percentage points."""
    if form == "share":
        return f"{value * 100:+.1f} pp"
    if value == 0:
        return "±" + shown(0.0, form)
    sign = "+" if value > 0 else "−"
    return sign + shown(abs(value), form)


def between(low: float, high: float, form: str) -> str:
    """The limits of an interval, such as 90.5 – 91.9; one that is tiny beside the other is 0."""
    if max(abs(low), abs(high)) >= 0.0005:
        low, high = (edge if abs(edge) >= 0.0005 else 0.0 for edge in (low, high))
    return f"{_bare(low, form)} – {_bare(high, form)}"


def limits_of(cell: Cell, form: str) -> str:
    """The limits of a cell; "" where it has none, or where every seed has the same count."""
    limits = cell.interval.limits
    if limits is None or (form == "count" and limits[0] == limits[1]):
        return ""
    return between(*limits, form)


def _bare(value: float, form: str) -> str:
    return shown(value, form).removesuffix(" %").removesuffix(" MiB")
