from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from moecore.report import pictures
from moecore.report.charts import Look, Point, curves_chart
from moecore.report.direct_labels import apart
from moecore.report.drawing import INK, PALETTE, expert_colours, line_look, share_axis
from moecore.report.maps import expert_load, expert_maps
from moecore.report.training_figures import confusion_matrix, routing_agreement


def shares(number: int) -> tuple[float, ...]:
    return (1 / number,) * number


@pytest.mark.parametrize("experts", [2, 8, 32])
def test_expert_load_draws_one_panel_a_layer(experts):
    figure = expert_load([shares(experts)] * 3)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 3
    assert len(figure.axes[0].patches) == experts


def test_a_method_without_points_keeps_its_colour():
    points = [Point(x, 0.5, 0.4, 0.6) for x in (0.0, 0.1)]
    axes = curves_chart({"dense": [], "vmoe": points}, Look("", "", "")).axes[0]
    assert [line.get_color() for line in axes.lines] == [PALETTE[1]]


def test_curves_over_whole_numbers_have_whole_ticks():
    points = [Point(k, 0.5, 0.4, 0.6) for k in (1, 2, 4)]
    axes = curves_chart({"dense": [], "vmoe": points}, Look("", "k", "Accuracy", True)).axes[0]
    assert list(axes.get_xticks()) == [1, 2, 4]
    assert len(axes.lines) == 1
    assert axes.get_ylim()[0] == 0


def test_a_curve_near_the_top_is_not_cut():
    points = [Point(k, 0.83, 0.82, 0.84) for k in (1, 2, 4)]
    axes = curves_chart({"vmoe": points}, Look("", "k", "Accuracy", True)).axes[0]
    assert axes.get_ylim() == pytest.approx((0, 1.05 * 0.84))


def test_ticks_between_whole_percents_are_not_rounded():
    axes = Figure().subplots()
    share_axis(axes, "Accuracy")
    printed = [axes.yaxis.get_major_formatter()(value) for value in (0.07, 0.775, 1)]
    assert printed == ["7%", "77.5%", "100%"]


@pytest.mark.parametrize("methods", [1, 6, 8])
def test_curves_have_their_names_at_their_ends(methods):
    points = [Point(k, 0.5, 0.4, 0.6) for k in (1, 2)]
    curves = {f"ermoe_without_{number}": points for number in range(methods)}
    figure = curves_chart(curves, Look("", "k", "Accuracy"))
    figure.canvas.draw()
    names = figure.axes[0].texts
    assert {name.get_text() for name in names} == set(curves)
    boxes = sorted((Text.get_window_extent(name) for name in names), key=lambda box: box.y0)
    assert all(0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes)), "names overlap"
    assert figure.legends == []


def test_names_move_as_little_as_they_must():
    assert apart([0.2, 0.5, 0.9], 0.1) == pytest.approx([0.2, 0.5, 0.9])
    assert apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert apart([0.98, 1.0], 0.1) == pytest.approx([0.9, 1.0])
    assert apart([0.0, 0.02, 0.5], 0.1) == pytest.approx([0.0, 0.1, 0.5])


def test_one_epoch_has_whole_ticks():
    points = {"agreement_with_final": {}, "agreement_consecutive": {}}
    points["agreement_consecutive"]["vmoe"] = [Point(2, 0.5, 0.5, 0.5)]
    figure = routing_agreement(points)
    figure.canvas.draw()
    ticks = [text.get_text() for text in figure.axes[1].get_xticklabels()]
    assert all(tick.isdigit() for tick in ticks) and "2" in ticks


def test_a_curve_below_zero_is_held():
    points = [Point(k, -0.5 * k, -0.6 * k, -0.4 * k) for k in (0, 1)]
    axes = curves_chart({"vmoe": points}, Look("", "k", "Gain")).axes[0]
    assert axes.get_ylim()[0] <= -0.6


def test_a_legend_of_long_names_lies_within_its_figure():
    points = [Point(k, 0.5, 0.4, 0.6) for k in (1, 2)]
    curves = {f"ermoe_without_orthogonality_{number}": points for number in range(24)}
    figure = curves_chart(curves, Look("", "k", "Accuracy"))
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert box.y1 <= figure.axes[0].get_tightbbox().y0


def test_settings_of_matplotlib_are_left_alone():
    before = dict(matplotlib.rcParams)
    pictures.svg(confusion_matrix([[3, 1], [0, 4]], ["a", "b"]), "confusion")
    assert dict(matplotlib.rcParams) == before


def test_ticks_have_their_colour_whoever_saves_a_figure(tmp_path):
    figure = expert_load([shares(4)])
    figure.savefig(tmp_path / "load.png")
    assert figure.axes[0].get_xticklabels()[0].get_color() == INK


def test_svg_follows_the_page_and_has_a_label():
    text = pictures.svg(expert_load([shares(4)]), 'load of "x"')
    assert text.startswith("<svg")
    assert "currentColor" in text
    assert INK not in text
    assert "<metadata" not in text
    assert 'aria-label="load of &quot;x&quot;"' in text
    assert ' height="' not in text.split(">")[0]
    assert pictures.png(expert_load([shares(4)])).startswith("data:image/png;base64,")


def test_looks_are_distinct():
    assert len({tuple(line_look(index).items()) for index in range(28)}) == 28
    assert len(set(expert_colours(8))) == 8
    assert len(set(expert_colours(64))) == 64


def test_expert_maps_draws_a_tile_a_class_on_the_experts_grid():
    # two models, three classes, 32 experts on 4 rows of 8
    maps = np.random.default_rng(0).dirichlet(np.ones(32), size=(2, 3))
    maps[1, 2] = np.nan
    axes = expert_maps({"MoE": maps[0].tolist(), "MoGE": maps[1]}, ["a", "b", "c"]).axes[0]
    tiles = [np.asarray(image.get_array()) for image in axes.images]
    assert [tile.shape for tile in tiles] == [(4, 8, 4)] * 6
    words = [text.get_text() for text in axes.texts]
    assert words[:5] == ["MoE", "MoGE", "a", "b", "c"]
    assert words[5] == f"0 – {maps[0].max():.2g}"
    brightest = np.unravel_index(maps[0].argmax(), (3, 32))
    # One scale a row: the largest of the row is magma's last colour, and the only one of its kind.
    row = np.concatenate([tile.reshape(32, 4) for tile in tiles[:3]])
    assert row[:, :3].sum(1).argmax() == brightest[0] * 32 + brightest[1]
    assert tiles[5].max() == 0, "a class without images stays bare"


def test_expert_maps_shows_the_first_classes_of_many():
    figure = expert_maps({"MoE": np.full((40, 8), 0.125)}, [str(name) for name in range(40)])
    assert len(figure.axes[0].images) == 12
