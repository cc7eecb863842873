"""What the page says of experts and truth: the share of routing's worth that a method finds."""

import numpy as np
import pytest
import torch

from moecore.measure.trained import Trained, collect_outcome_values
from moecore.measure.truth import Truth, truth_layer
from moecore.measure.values import Found, Value
from moecore.report.column import Column
from moecore.report.figures.overview import (
    draw_clean_against_attacked,
    methods_to_label,
    overview_charts,
)
from moecore.report.headline_quantities import QuantityByMethod, phase_quantities
from moecore.report.page.report_page import main_finding
from moecore.report.pictures import truth
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.cells import Cell, keep_percent_on_line
from moecore.report.tables.first_sentence import first_sentence
from moecore.report.tables.metrics_by_method import build_table, compare_methods
from moecore.statistics.comparisons import encode_item_values
from moecore.statistics.intervals import Interval
from moecore.tasks.next_token import NextToken
from tests.report import generated

ROUTERS = "methods: {dense: {}, vmoe: {router: {kind: top}}, told: {router: {kind: told}}}"
RIGHT = {"dense": 4, "vmoe": 6, "told": 9}  # of ten images


def trained(right: int, seed: int) -> Measured:
    scores = (np.arange(10) + seed) % 10 < right
    changes = {
        "purity": (0.3, right / 10),
        "test_score": generated.estimate(right / 10, 0.0, 1.0),
        "test_items": encode_item_values(scores.astype(float)),
    }
    outcome = generated.trained(0, seed, False, "pretrain").model_copy(update=changes)
    result = Found(values=changed(right), facts={"counts": []})
    return Measured({Trained: collect_outcome_values(outcome), Truth: result})


def changed(right: int) -> list[Value]:
    places = [({"noise": 0.0}, 0.0), ({"noise": 0.2}, 0.02), ({"change": "noise_0_2"}, 0.02)]
    places += [({"attack": 0.0}, 0.0), ({"attack": 8.0}, 0.01), ({"change": "attack_8"}, 0.01)]
    return [Value(metric="changed_purity", at=at, value=right / 10 - less) for at, less in places]


def phase(**right: int) -> Phase:
    models = {name: {seed: trained(r, seed) for seed in range(3)} for name, r in right.items()}
    return Phase("pretrain", {"name": "digits"}, generated.TASK, models)


def test_a_method_between_floor_and_ceiling():
    """(6 - 4) / (9 - 4) of ten images, with each seed."""
    share = truth.share_of_routings_worth(phase(**RIGHT), "vmoe")
    assert share.value == pytest.approx(0.4) and (share.seeds, share.items) == (3, 10)
    (block,) = truth.truth_blocks(phase(**RIGHT))
    said = [line for line in block.words if line.startswith("vmoe finds 40 % [")]
    half = 100 * share.half()
    assert f"[{40 - half:.0f} – {40 + half:.0f}]" in said[0], "the lower limit first"
    assert len(said) == 1 and not any(line.startswith("told") for line in block.words)
    results = Results({"pretrain": phase(**RIGHT)})
    (first,) = results.phases.values()
    known = {"pretrain": phase_quantities(first, build_table(results, first))}
    assert main_finding(results, known, ()).startswith(keep_percent_on_line(said[0]))
    compared = compare_methods(results)
    cells = {method: compared[method]["pretrain"]["headroom_recovered"] for method in RIGHT}
    assert cells["dense"]["mean"] == 0 and cells["told"]["mean"] == 1
    _, low, high = share.interval()
    ours = (cells["vmoe"][key] for key in ("mean", "low", "high"))
    assert tuple(ours) == pytest.approx((0.4, low, high))


def test_the_first_figure_has_floor_and_ceiling():
    """Dashed lines at 0.4 and 0.9, all points in the panel; without the ceiling there are none."""
    for methods, expected in ((RIGHT, [0.4, 0.9]), ({"dense": 4, "vmoe": 6}, [])):
        found = Results({"pretrain": phase(**methods)})
        (known,) = found.phases.values()
        (picture,) = overview_charts(known, phase_quantities(known, build_table(found, known)))
        axes = picture.figure.axes[0]
        dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed == pytest.approx(expected)
        left, right = axes.get_xlim()
        assert all(left <= x <= right for line in axes.lines for x in line.get_xdata())


def test_the_ceiling_is_never_the_best():
    """All right, beyond chance: marked where no settings say that the router is told."""
    known = phase(dense=1, vmoe=5, told=10)
    for settings, best in ("", "told"), (ROUTERS, "vmoe"):
        found = Results({"pretrain": known}, settings)
        cells = build_table(found, known).cells
        assert [name for name in cells if cells[name]["test_accuracy"].marked] == [best]
    quantities = phase_quantities(known, build_table(found, known), found.controls)
    said = first_sentence(found)
    assert (
        "(dense and vmoe; not compared: told; 3 seeds): vmoe is 40 p" in said
        and said.count("told") == 1
    )
    assert list(quantities.score.floor_and_ceiling) == ["dense", "told"]


def test_of_many_points_the_figure_names_floor_ceiling_and_the_best():
    """Thirteen methods: the best three clean, and the best three under attack."""
    values = {f"m{number}": 0.3 + number / 100 for number in range(11)}
    values |= {"dense": 0.1, "told": 0.2}
    score = QuantityByMethod("", Column("x", "x", float, "higher"), as_cells(values))
    errors = QuantityByMethod("", Column("x", "x", float, "lower"), as_cells(values))
    assert methods_to_label(score, errors) == {"dense", "told", "m0", "m8", "m9", "m10"}
    looks = {name: {"color": "black", "marker": "o"} for name in values}
    (axes,) = draw_clean_against_attacked(score, errors, looks).axes
    assert {text.get_text() for text in axes.texts} == methods_to_label(score, errors)
    assert len([line for line in axes.lines if line.get_marker() == "o"]) == 13


def as_cells(values: dict[str, float]) -> dict[str, Cell]:
    return {name: Cell(Interval(value), "", 1) for name, value in values.items()}


def test_experts_beyond_the_kinds_are_said_to_match_none():
    kinds = torch.tensor([[1, 2]]).repeat(5, 1)
    for number, said in (2, "Percent of each expert's tokens."), (4, "the last 2 are matched to "):
        counts = truth_layer(kinds - 1, kinds, number, 2).counts
        result = Found(values=(), facts={"counts": [counts]})
        ((_, figure),) = truth.figures(result)
        assert said in figure.caption


def test_of_a_text_less_is_better():
    nats = {name: 10 - number for name, number in RIGHT.items()}
    share = truth.share_of_routings_worth(phase(**nats)._replace(task=NextToken(words=9)), "vmoe")
    assert share.value == pytest.approx(0.4)


@pytest.mark.parametrize("method", RIGHT)
def test_without_floor_or_ceiling_or_worth_there_is_no_share(method):
    others = {name: number for name, number in RIGHT.items() if name != method}
    assert truth.share_of_routings_worth(phase(**others), "vmoe") is None
    assert truth.share_of_routings_worth(phase(**RIGHT | {"told": 4}), method) is None


def test_purity_over_epochs_under_noise_and_under_attack():
    """vmoe: 0.6 clean, 2 points less with σ = 0.2, 1 less with ε = 8/255."""
    axes = [picture.figure.axes[0] for picture in truth.purity_curves(phase(**RIGHT))]
    curves = [one.lines[1].get_xydata() for one in axes]
    expected = [[1, 0.3], [2, 0.6]], [[0, 0.6], [0.2, 0.58]], [[0, 0.6], [8, 0.59]]
    assert np.array(curves) == pytest.approx(np.array(expected))
    compared = compare_methods(Results({"pretrain": phase(**RIGHT)}))["vmoe"]["pretrain"]
    purities = (compared[name]["mean"] for name in ("purity_noise_0_2", "purity_attack_8"))
    assert tuple(purities) == pytest.approx((0.58, 0.59))
