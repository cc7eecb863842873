"""Parts of a phase's section for ages: table S1, scatter plots, errors by group, regions and their experts, ageing and rescans."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from moecore.evaluation.intervals import Interval, over_seeds
from moecore.report.figures_age import age_scatter, errors_by_group, pad_against_age
from moecore.report.figures_errors import ageing_curves
from moecore.report.figures_regions import region_shares
from moecore.report.markup import figure, table_of, with_limits
from moecore.report.metric import number
from moecore.report.metrics_ages import ORDER, PROBE, TABLE_S1, known, probe_order
from moecore.report.parts import Models, first_of
from moecore.report.results import Measured
from moecore.report.tables import Cell

NUMBERS = {"mae": "MAE, years", "corr": "corr(ŷ − y, y)", "slope": "slope", "intercept": "intercept"}
TISSUES = {"wm": "white matter", "gm": "grey matter", "csf": "CSF"}
CONTROL = "random_"


def ages(models: Models, phase: str) -> str:
    """Table S1 and the predicted ages of every method; nothing where the answers are no ages."""
    found = first_of(models).calibrate
    if found.get("task") != "regression":
        return ""
    low, high = found["age_range"]
    words = (
        f"{found['n_test']} test volumes, ages {low:.1f} to {high:.1f}. Always answering with the training's median age has an MAE of "
        f"<b>{found['median_mae']:.2f} years</b>. The correction (ŷ − a)/b was fitted on: {escape(found['fit_on'].replace('_', ' '))}; it takes no age."
    )
    scatter, gaps, groups = (_each(models, phase, *drawn) for drawn in _DRAWN)
    more = f"<details><summary>Brain-PAD, and errors by decade, sex and site</summary><div class=grid>{gaps}{groups}</div></details>"
    return f"<h3>Predicted age</h3><p>{words}</p>{table_s1(models)}<div class=grid>{scatter}</div>{more}{_refusals(models)}"


def table_s1(models: Models) -> str:
    """Raw, pooled and per-sex predictions of every method: means over seeds with their intervals; one seed has its bootstrap's."""
    rows = []
    for method, seeds in models.items():
        for name, words in TABLE_S1.items():
            cells = [_cell(list(seeds.values()), name, key) for key in NUMBERS]
            rows.append([f'<th scope="row">{escape(method)}<span class="note">{words}</span></th>', *cells])
    return table_of(["<th>Prediction</th>", *(f"<th>{words}</th>" for words in NUMBERS.values())], rows)


def regions(models: Models, phase: str) -> str:
    """The two experts with the highest scores for each tissue at the first, a middle and the last epoch, and a random-mask control."""
    probed = {method: probes for method, seeds in models.items() if (probes := next(iter(seeds.values())).trained.get("region_routing"))}
    if not probed:
        return ""
    words = (
        "For each tissue the two experts with the highest mean score over its tokens, at three epochs. Control: as many tokens drawn at random from "
        "the brain. An expert knows its tissue where its share of the tokens is well above the control's. First seed."
    )
    tables = "".join(f"<h4>{escape(method)}</h4>{_probe_table(probes)}" for method, probes in probed.items())
    drawn = "".join(figure(region_shares(probes[-1]["rows"], f"Choices by tissue: {method}"), f"{phase}: regions of {method}") for method, probes in probed.items())
    return f'<h3>Which expert answers for which tissue</h3><p class="quiet">{words}</p>{tables}<div class=grid>{drawn}</div>'


def checks(models: Models, phase: str) -> str:
    """Predictions for the same simulated subjects as they age, and what could not be checked; nothing where the stage did not run."""
    first = {method: next(iter(seeds.values())).cohort_checks for method, seeds in models.items()}
    if not any(first.values()):
        return ""
    drawn, reasons = "", {}
    for method, found in first.items():
        reasons |= found.get("reasons", {})
        older = found.get("ageing")
        if older and "ages" in older:
            curves = ageing_curves(older["ages"], older["predictions"], f"Simulated subjects, aged: {method}")
            drawn += figure(curves, f"{phase}: ageing of {method}", f"Rising steps: {older['monotone_share']:.0%}. First seed.")
    notes = "".join(f'<p class="quiet">Not checked, {escape(name)}: {escape(reason)}.</p>' for name, reason in reasons.items())
    return f"<h3>Tissues alone, ageing, rescans</h3>{_tissues(models)}{notes}<div class=grid>{drawn}</div>" if drawn or notes or _tissues(models) else ""


def _tissues(models: Models) -> str:
    """Errors with one tissue left of each volume, as predicted and of a linear probe, the probe's order of tissues, and the rescans' difference."""
    names = {"whole": "Whole volume"} | {name: f"{words.capitalize() if name != 'csf' else words} alone" for name, words in TISSUES.items()}
    columns: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = [(words, lambda found, name=name: _error(found, name, "")) for name, words in names.items()]
    columns += [(f"{words}, probe", lambda found, name=name: _error(found, name, "probe_")) for name, words in names.items()]
    columns += [(f"{more.upper()} − {less.upper()}, probe", lambda found, pair=(more, less): probe_order(found, *pair)) for more, less in ORDER]
    columns.append(("Rescan, years apart", _apart))
    shown = {words: [_mean([read(model.cohort_checks) for model in seeds.values()]) for seeds in models.values()] for words, read in columns}
    shown = {words: cells for words, cells in shown.items() if any(cells)}
    if not shown:
        return ""
    rows = [
        [f'<th scope="row">{escape(method)}</th>', *(f"<td>{with_limits(cells[place], 'number') if cells[place] else '–'}</td>" for cells in shown.values())]
        for place, method in enumerate(models)
    ]
    probed = f'<p class="quiet">Probe: {PROBE}.</p>' if any(words.endswith(", probe") for words in shown) else ""
    return probed + table_of(["<th>MAE, years</th>", *(f"<th>{escape(words)}</th>" for words in shown)], rows)


def _error(found: Mapping[str, Any], name: str, prefix: str) -> Interval | None:
    stored = found.get("whole") if name == "whole" else (found.get("isolated") or {}).get(name)
    return Interval(*(stored.get(f"{prefix}{key}") for key in ("mae", "low", "high"))) if stored and f"{prefix}mae" in stored else None


def _apart(found: Mapping[str, Any]) -> Interval | None:
    stored = found.get("rescan")
    return Interval(stored["mean_abs_difference"], stored.get("low"), stored.get("high")) if stored else None


def _cell(models: Sequence[Measured], name: str, key: str) -> str:
    read = [known(model.calibrate[name][key]) if model.calibrate.get(name) else None for model in models]
    found = _mean(read)
    return f"<td>{with_limits(found, 'number')}</td>" if found else '<td class="quiet">–</td>'


def _mean(read: Sequence[Interval | None]) -> Cell | None:
    """The mean over seeds with Student's interval; one seed's own interval; None where a seed has no value."""
    if any(found is None for found in read):
        return None
    found = read[0] if len(read) == 1 else over_seeds([number(one) for one in read])
    return Cell(found, "" if found.low is None else "t", len(read))


def _refusals(models: Models) -> str:
    """Which methods got no correction, and why."""
    found = {f"{method}, seed {seed}": model.calibrate["refused"] for method, seeds in models.items() for seed, model in seeds.items() if model.calibrate.get("refused")}
    return "".join(f'<p class="quiet">Not corrected: {escape(name)}. {escape(reason)}</p>' for name, reason in found.items())


def _each(models: Models, phase: str, what: str, draw: Callable[[Mapping[str, Any], str], Any], caption: str) -> str:
    first = {method: next(iter(seeds.values())).calibrate for method, seeds in models.items()}
    return "".join(figure(draw(found, f"{what}: {method}"), f"{phase}: {what} of {method}", caption) for method, found in first.items())


def _probe_table(probes: Sequence[Mapping[str, Any]]) -> str:
    head = ["<th>Tissue</th>", *(f"<th>Epoch {probe['epoch']}</th><th>Control</th>" for probe in probes)]
    rows = []
    for region in dict.fromkeys(row["region"].removeprefix(CONTROL) for probe in probes for row in probe["rows"]):
        cells = [_top_two({row["region"]: row for row in probe["rows"]}.get(prefix + region)) for probe in probes for prefix in ("", CONTROL)]
        rows.append([f'<th scope="row">{escape(TISSUES.get(region, region))}</th>', *cells])
    return table_of(head, rows)


def _top_two(row: Mapping[str, Any] | None) -> str:
    """The experts with their scores, and under them the share of the tokens that choose them."""
    if row is None:
        return '<td class="quiet">–</td>'
    experts = "<br>".join(f"{escape(str(name))} {score:.3f}" for name, score in row["experts"])
    chosen = ", ".join(f"{row['share'][name]:.0%}" for name, _ in row["experts"] if name in row["share"])
    return f'<td>{experts}<span class="limits">{f"chosen by {chosen}" if chosen else ""}</span></td>'


_DRAWN: tuple[tuple[str, Callable[[Mapping[str, Any], str], Any], str], ...] = (
    ("Predicted age", lambda found, title: age_scatter(found["points"], title, found["simulated"]), "Test split, first seed."),
    ("Brain-PAD", lambda found, title: pad_against_age(found["points"], title, found["simulated"]), "Grey lines: mean and mean ± 1.96 SD. First seed."),
    (
        "Error by group",
        lambda found, title: errors_by_group({name: found.get(f"by_{name}", []) for name in ("decade", "sex", "site")}, title, found["simulated"]),
        "95 % intervals over participants. First seed.",
    ),
)
