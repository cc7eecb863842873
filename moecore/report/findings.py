"""The one line that a folded part of the page says of itself: what a column of the table holds."""

from collections.abc import Collection

from moecore.report.cells import Cells
from moecore.report.column import Column
from moecore.report.quantities import of_column
from moecore.report.words import between, decimals, shown


def finding(column: Column, cells: Cells, controls: Collection[str] = ()) -> str:
    """Who is ahead where that was shown, else from where to where the values reach."""
    having = {
        method: found
        for method, found in of_column(column.name, cells).items()
        if method not in controls
    }
    if not having:
        return ""
    form = column.form
    places = decimals([found.interval for found in having.values()], form)
    values = {method: found.interval.value for method, found in having.items()}
    leader = next((method for method, found in having.items() if found.leads), None)
    if leader is not None:
        limits = having[leader].interval.limits
        span = f" ({between(*limits, form, places)})" if limits else ""
        best = shown(values[leader], form, places)
        return f"{column.label}: {best}{span} of {leader} is {column.better} than all others"
    ends = (min(values, key=values.__getitem__), max(values, key=values.__getitem__))
    told = [f"{shown(values[one], form, places)} ({one})" for one in dict.fromkeys(ends)]
    return f"{column.label}: {' to '.join(told)}"
