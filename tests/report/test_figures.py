import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from moecore.report import figures
from moecore.report.inline import inline_png, inline_svg
from moecore.report.style import INK, PALETTE, expert_colours, line_look


def shares(number: int) -> list[float]:
    return (np.ones(number) / number).tolist()


@pytest.mark.parametrize("experts", [2, 8, 32])
def test_expert_load_draws_one_panel_a_layer(experts):
    figure = figures.expert_load([shares(experts)] * 3)
    assert isinstance(figure, Figure) and len(figure.axes) == 3 and len(figure.axes[0].patches) == experts


def test_a_method_without_rows_keeps_its_colour():
    rows = [{"epsilon": e, "value": 0.5, "low": 0.4, "high": 0.6} for e in (0.0, 0.1)]
    axes = figures.robustness_curve({"dense": [], "vmoe": rows}).axes[0]
    assert [line.get_color() for line in axes.lines] == [PALETTE[1]]


def test_settings_of_matplotlib_are_left_alone():
    before = dict(matplotlib.rcParams)
    figures.confusion_matrix([[3, 1], [0, 4]], ["a", "b"])
    assert dict(matplotlib.rcParams) == before


def test_ticks_keep_their_colour_outside_the_style():
    axes = figures.expert_load([shares(4)]).axes[0]
    assert axes.get_xticklabels()[0].get_color() == INK


def test_svg_follows_the_page_and_has_a_label():
    text = inline_svg(figures.expert_load([shares(4)], "a < b"), 'load of "x"')
    assert text.startswith("<svg") and "currentColor" in text and INK not in text and "<metadata" not in text
    assert 'aria-label="load of &quot;x&quot;"' in text and ' height="' not in text.split(">")[0]
    assert inline_png(figures.expert_load([shares(4)]), "load").startswith('<img alt="load" src="data:image/png;base64,')


def test_looks_are_distinct():
    assert len({tuple(line_look(index).items()) for index in range(28)}) == 28
    assert len(set(expert_colours(8))) == 8 and len(set(expert_colours(64))) == 64


def test_expert_maps_draws_a_panel_a_class_on_the_experts_grid():
    maps = np.random.default_rng(0).dirichlet(np.ones(32), size=(2, 3))  # two models, three classes, 32 experts on 4 rows of 8
    maps[1, 2] = np.nan
    figure = figures.expert_maps({"MoE": maps[0].tolist(), "MoGE": maps[1]}, ["a", "b", "c"])
    panels, bars = figure.axes[:6], figure.axes[6:]
    assert len(bars) == 2 and [axes.get_title() for axes in panels[:3]] == ["a", "b", "c"]
    assert [axes.get_ylabel() for axes in panels] == ["MoE", "", "", "MoGE", "", ""]
    for number, axes in enumerate(panels[:5]):
        shown = axes.images[0]
        np.testing.assert_array_equal(shown.get_array(), maps[number // 3, number % 3].reshape(4, 8))
        assert shown.get_clim() == (0, np.nanmax(maps[number // 3])), "one scale a row"
    assert panels[5].images[0].get_array().mask.all(), "a class without images stays bare"


def test_expert_maps_shows_the_first_classes_of_many():
    figure = figures.expert_maps({"MoE": np.full((40, 8), 0.125)}, [str(name) for name in range(40)], most=5)
    assert [axes.get_title() for axes in figure.axes[:5]] == list("01234") and len(figure.axes) == 6
