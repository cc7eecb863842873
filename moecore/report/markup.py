"""Small pieces of HTML: numbers, tables, figures."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from moecore.report.inline import inline_png, inline_svg
from moecore.report.tables import Cell, Metric, best


def shown(value: float, form: str) -> str:
    """A number for readers: share 0.912 → 91.2 %, count 12345 → 12,345, seconds 75 → 1 min 15 s, else three figures."""
    if form == "share":
        return f"{value * 100:.1f} %"
    if form == "count":
        return f"{value:,.0f}"
    if form == "seconds":
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
    return f"{value:.3f}" if 0.0005 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"


def by_method(metrics: Sequence[Metric], cells: Mapping[str, Mapping[str, Cell | None]]) -> str:
    """Methods as rows, metrics as columns: the headline."""
    marks = {metric.name: best(metric, {method: row[metric.name] for method, row in cells.items()}) for metric in metrics}
    head = [f"<th>{escape(metric.label)}</th>" for metric in metrics]
    rows = [[_th(method), *(_td(row[metric.name], metric, marks[metric.name] == method) for metric in metrics)] for method, row in cells.items()]
    return _table(["<th>Method</th>", *head], rows)


def by_metric(metrics: Sequence[Metric], cells: Mapping[str, Mapping[str, Cell | None]]) -> str:
    """Metrics as rows, methods as columns: everything."""
    rows = []
    for metric in metrics:
        mark = best(metric, {method: row[metric.name] for method, row in cells.items()})
        rows.append([_th(metric.label, metric.note), *(_td(row[metric.name], metric, mark == method) for method, row in cells.items())])
    return _table(["<th>Metric</th>", *(f"<th>{escape(method)}</th>" for method in cells)], rows)


def facts(rows: Mapping[str, Any]) -> str:
    """Two columns: what, and its value."""
    return _table([], [[_th(name), f'<td style="text-align:left">{escape(str(value))}</td>'] for name, value in rows.items()])


def figure(drawn: Figure, label: str, caption: str = "", png: bool = False) -> str:
    """A figure with its caption; ``label`` must be unique in the page."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{(inline_png if png else inline_svg)(drawn, label)}{words}</figure>"


def _td(cell: Cell | None, metric: Metric, marked: bool) -> str:
    if cell is None:
        return '<td class="quiet">–</td>'
    value, low, high = cell.interval
    limits = f'<span class="limits">{_between(low, high, metric.form)}</span>' if low is not None else ""
    return f'<td{" class=best" if marked else ""}>{shown(value, metric.form)}{limits}</td>'


def _between(low: float, high: float, form: str) -> str:
    return f"{shown(low, form).removesuffix(' %')} – {shown(high, form).removesuffix(' %')}"


def _th(text: str, note: str = "") -> str:
    return f'<th scope="row">{escape(text)}' + (f'<span class="note">{escape(note)}</span>' if note else "") + "</th>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
