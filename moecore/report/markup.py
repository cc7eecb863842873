"""Small pieces of HTML: numbers, tables, figures."""

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from moecore.report.inline import inline_png, inline_svg
from moecore.report.metric import Metric
from moecore.report.paper_figures import PAPERS, Reported
from moecore.report.tables import Cell


def shown(value: float, form: str) -> str:
    """A number for readers: share 0.912 → 91.2 %, count 12345 → 12,345, seconds 75 → 1 min 15 s, bytes 3145728 → 3.0 MiB,
    else three figures."""
    if form == "share":
        return f"{value * 100:.1f} %"
    if form == "count":
        return f"{value:,.0f}"
    if form == "seconds":
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
    if form == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.3f}" if 0.0005 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"


def signed(value: float, form: str) -> str:
    """A difference with its sign; shares in percentage points."""
    return f"{value * 100:+.1f} pp" if form == "share" else ("+" if value > 0 else "−" if value < 0 else "±") + shown(abs(value), form)


def by_method(
    metrics: Sequence[Metric], cells: Mapping[str, Mapping[str, Cell | None]], papers: Sequence[Reported] = (), controls: Collection[str] = ()
) -> str:
    """Methods as rows, ``controls`` called so, metrics as columns; below them what the papers report of their own models."""
    head = [f"<th>{escape(metric.label)}</th>" for metric in metrics]
    rows = [[_th(method, "control" if method in controls else ""), *(_td(row[metric.name], metric) for metric in metrics)] for method, row in cells.items()]
    for model in papers:
        rows.append([_th(f"Paper: {model.model}", model.source), *(_reported(model.values.get(metric.name), metric) for metric in metrics)])
    return table_of(["<th>Method</th>", *head], rows, [*[""] * len(cells), *["paper"] * len(papers)])


def by_metric(metrics: Sequence[Metric], cells: Mapping[str, Mapping[str, Cell | None]]) -> str:
    """Metrics as rows, methods as columns: everything, the metrics of a paper under its name."""
    rows, looks, paper = [], [], ""
    for metric in metrics:
        if metric.paper != paper:
            paper = metric.paper
            rows.append([_th(PAPERS[paper]), f'<td colspan="{len(cells)}"></td>'])
            looks.append("group")
        looks.append("")
        rows.append([_th(metric.label, metric.note), *(_td(row[metric.name], metric) for row in cells.values())])
    return table_of(["<th>Metric</th>", *(f"<th>{escape(method)}</th>" for method in cells)], rows, looks)


def facts(rows: Mapping[str, Any]) -> str:
    """Two columns: what, and its value."""
    return table_of([], [[_th(name), f'<td class="words">{escape(str(value))}</td>'] for name, value in rows.items()])


def figure(drawn: Figure, label: str, caption: str = "", png: bool = False) -> str:
    """A figure with its caption; ``label`` must be unique in the page."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{(inline_png if png else inline_svg)(drawn, label)}{words}</figure>"


def _td(cell: Cell | None, metric: Metric) -> str:
    if cell is None:
        return '<td class="quiet">–</td>'
    return f'<td{" class=best" if cell.marked else ""}>{with_limits(cell, metric.form)}</td>'


def with_limits(cell: Cell, form: str) -> str:
    """A value, and in small figures the limits of its interval."""
    value, low, high = cell.interval
    counted = form == "count" and low == high  # parameters: the same in every seed
    limits = "" if low is None or counted else f'<span class="limits">{between(low, high, form)}</span>'
    return f"{shown(value, form)}{limits}"


def between(low: float, high: float, form: str) -> str:
    """The limits of an interval as words, such as 90.5 – 91.9."""
    return f"{_bare(low, form)} – {_bare(high, form)}"


def _bare(value: float, form: str) -> str:
    return shown(value, form).removesuffix(" %").removesuffix(" MiB")


def _reported(value: float | None, metric: Metric) -> str:
    """A paper's number with the digits that the paper prints."""
    if value is None:
        return "<td></td>"
    words = {"share": f"{100 * value:.4g} %", "count": f"{value:,.0f}"}
    return f"<td>{words.get(metric.form, format(value, '.4g'))}</td>"


def _th(text: str, note: str = "") -> str:
    return f'<th scope="row">{escape(text)}' + (f'<span class="note">{escape(note)}</span>' if note else "") + "</th>"


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], looks: Sequence[str] = ()) -> str:
    """A table that scrolls by itself, of ready <th> and <td>; ``looks``: the class of each row."""
    looks = looks or [""] * len(rows)
    top = f"<thead><tr>{''.join(head)}</tr></thead>" if head else ""
    body = "".join(f"<tr{f' class={look}' if look else ''}>{''.join(row)}</tr>" for row, look in zip(rows, looks, strict=True))
    return f'<div class="scroll{" dense" if len(rows) > 8 else ""}"><table>{top}<tbody>{body}</tbody></table></div>'
