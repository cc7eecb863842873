import json
import re
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from moecore.measure.training import epoch_running_mean_losses, steps_until_baseline_loss
from moecore.report.figures import charts, model_figures
from moecore.report.figures.drawing import INK, PALETTE, expert_colours, line_style
from moecore.report.figures.model_figures import draw_expert_grids_by_class, draw_expert_load
from moecore.report.page import explorer_page
from moecore.report.page import report_page as pictures
from moecore.report.result_types import StudyResults
from moecore.tasks.next_token import NextToken
from moecore.training.outcome import Outcome
from moecore.training.regularizers.group_sparsity import GroupSparsity
from tests.measure.subjects import images, moe, subject
from tests.report import explored
from tests.report.generated import model_with_results, trained


def shares(number: int) -> tuple[float, ...]:
    return (1 / number,) * number


@pytest.mark.parametrize("experts", [2, 8, 32])
def test_expert_load_draws_one_panel_a_layer(experts):
    figure = draw_expert_load([shares(experts)] * 3)
    assert len(figure.axes) == 3 and len(figure.axes[0].patches) == experts


def chart_of(points: list[charts.CurvePoint]):
    spec = charts.ChartSpec("", "k", "y", True)
    return charts.curves_chart({"dense": [], "vmoe": points}, spec).axes[0]


def test_curves_have_their_colour_whole_ticks_and_room():
    axes = chart_of([charts.CurvePoint(x, 0.5, 0.4, 0.6) for x in (0.0, 0.1)])
    assert [line.get_color() for line in axes.lines] == [PALETTE[1]], "the second method's"
    axes = chart_of([charts.CurvePoint(k, 0.83, 0.82, 0.84) for k in (1, 2, 4)])
    assert list(axes.get_xticks()) == [1, 2, 4] and len(axes.lines) == 1
    assert axes.get_ylim() == pytest.approx((0, 1.05 * 0.84)), "near the top it is not cut"
    axes = chart_of([charts.CurvePoint(k, -0.5 * k, -0.6 * k, -0.4 * k) for k in (0, 1)])
    assert axes.get_ylim()[0] <= -0.6, "nor below zero"


@pytest.mark.parametrize("methods", [1, 6, 8])
def test_curves_have_their_names_at_their_ends(methods):
    points = [charts.CurvePoint(k, 0.5, 0.4, 0.6) for k in (1, 2)]
    curves = {f"ermoe_without_{number}": points for number in range(methods)}
    figure = charts.curves_chart(curves, charts.ChartSpec("", "k", "Accuracy"))
    figure.canvas.draw()
    names = figure.axes[0].texts
    assert {name.get_text() for name in names} == set(curves)
    boxes = sorted((Text.get_window_extent(name) for name in names), key=lambda box: box.y0)
    assert all(0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes)), "names overlap"
    assert figure.legends == []


def test_names_move_as_little_as_they_must():
    assert charts.spread_label_heights([0.2, 0.5, 0.9], 0.1) == pytest.approx([0.2, 0.5, 0.9])
    assert charts.spread_label_heights([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert charts.spread_label_heights([0.98, 1.0], 0.1) == pytest.approx([0.9, 1.0])
    assert charts.spread_label_heights([0.0, 0.02, 0.5], 0.1) == pytest.approx([0.0, 0.1, 0.5])


def test_one_epoch_has_whole_ticks():
    points = dict.fromkeys(model_figures.AGREEMENTS, {})
    points["agreement_consecutive"] = {"vmoe": [charts.CurvePoint(2, 0.5, 0.5, 0.5)]}
    figure = model_figures.draw_routing_agreement(points)
    figure.canvas.draw()
    ticks = [text.get_text() for text in figure.axes[-1].get_xticklabels()]
    assert all(tick.isdigit() for tick in ticks) and "2" in ticks


def test_a_legend_of_long_names_lies_within_its_figure():
    points = [charts.CurvePoint(k, 0.5, 0.4, 0.6) for k in (1, 2)]
    curves = {f"ermoe_without_orthogonality_{number}": points for number in range(24)}
    figure = charts.curves_chart(curves, charts.ChartSpec("", "k", "Accuracy"))
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert box.y1 <= figure.axes[0].get_tightbbox().y0


def test_svg_leaves_settings_alone_follows_the_page_and_has_a_label(tmp_path):
    before = dict(matplotlib.rcParams)
    confusion = model_figures.draw_confusion_matrix([[3, 1], [0, 4]], ["a", "b"])
    pictures.render_svg(confusion, "confusion")
    assert dict(matplotlib.rcParams) == before
    figure = draw_expert_load([shares(4)])
    figure.savefig(tmp_path / "load.png")
    assert figure.axes[0].get_xticklabels()[0].get_color() == INK, "whoever saves a figure"
    text = pictures.render_svg(draw_expert_load([shares(4)]), 'load of "x"')
    assert text.startswith("<svg") and "currentColor" in text
    assert INK not in text and "<metadata" not in text
    assert 'aria-label="load of &quot;x&quot;"' in text and ' height="' not in text.split(">")[0]
    assert pictures.render_png_data_uri(draw_expert_load([shares(4)])).startswith(
        "data:image/png;base64,"
    )


def test_looks_are_distinct():
    assert len({tuple(line_style(index).items()) for index in range(28)}) == 28
    assert len(set(expert_colours(8))) == 8 and len(set(expert_colours(64))) == 64


def test_expert_maps_draws_a_tile_a_class_on_the_experts_grid():
    # two models, three classes, 32 experts on 4 rows of 8
    maps = np.random.default_rng(0).dirichlet(np.ones(32), size=(2, 3))
    maps[1, 2] = np.nan
    rows = {"MoE": maps[0].tolist(), "MoGE": maps[1]}
    axes = draw_expert_grids_by_class(rows, ["a", "b", "c"]).axes[0]
    tiles = [np.asarray(image.get_array()) for image in axes.images]
    assert [tile.shape for tile in tiles] == [(4, 8, 4)] * 6
    words = [text.get_text() for text in axes.texts]
    assert words[:5] == ["MoE", "MoGE", "a", "b", "c"] and words[5] == f"0 – {maps[0].max():.2g}"
    brightest = np.unravel_index(maps[0].argmax(), (3, 32))
    # One scale a row: the largest of the row is magma's last colour, and the only one of its kind.
    row = np.concatenate([tile.reshape(32, 4) for tile in tiles[:3]])
    assert row[:, :3].sum(1).argmax() == brightest[0] * 32 + brightest[1]
    assert tiles[5].max() == 0, "a class without images stays bare"
    many = draw_expert_grids_by_class({"MoE": np.full((40, 8), 0.125)}, list(map(str, range(40))))
    assert len(many.axes[0].images) == 12, "the first classes of many"


def trained_with(losses: list[float], per_epoch: int) -> Outcome:
    """Logged after every ten steps."""
    points = [(10 * place, loss) for place, loss in enumerate(losses, start=1)]
    curve = [{"step": n, "epoch": n / per_epoch, "train_loss": loss} for n, loss in points]
    return trained(0, 0, True, "pretrain").model_copy(update={"curve": tuple(curve)})


def test_the_loss_of_the_last_epoch_by_hand():
    # two logged points an epoch
    found = epoch_running_mean_losses(trained_with([4.0, 2.0, 1.0, 3.0], 20))
    assert found == [(10, 4.0), (20, 3.0), (30, 1.5), (40, 2.0)]
    # a short point counts for as many steps as it is of: 10 · 4 and 5 · 1
    odd = trained_with([4.0], 15)
    last = {"step": 15, "epoch": 1.0, "train_loss": 1.0}
    odd = odd.model_copy(update={"curve": (*odd.curve, last)})
    assert epoch_running_mean_losses(odd)[-1] == (15, pytest.approx(3.0))


def test_steps_to_the_loss_of_another_training():
    slow, fast = (trained_with(losses, 10) for losses in ([4, 3, 2, 1], [3, 1, 0.5, 0.4]))
    assert steps_until_baseline_loss(fast, slow) == 20
    assert steps_until_baseline_loss(slow, slow) == 40
    assert steps_until_baseline_loss(slow, fast) == 50  # never: an epoch of ten steps after the end
    assert steps_until_baseline_loss(slow, slow.model_copy(update={"curve": ()})) is None


def test_of_text_perplexities_are_drawn():
    result = trained_with([4.0, 2.0, 1.0, 3.0], 10)
    nats = [{"train_nats": 6 - n, "validation_nats": 5 - n} for n in range(len(result.curve))]
    curve = tuple(row | more for row, more in zip(result.curve, nats, strict=True))
    words = result.model_copy(update={"curve": curve, "task": NextToken(words=9)})
    loss, below = model_figures.draw_training_curves({"smoe": [words], "smoge": [words]}).axes[:2]
    assert loss.lines[0].get_ydata() == pytest.approx(np.exp([6, 5, 4, 3]))
    assert below.lines[0].get_ydata() == pytest.approx(np.exp([5, 4, 3, 2]))
    assert below.get_ylabel() == "Validation perplexity" and below.get_yscale() == "log"


def test_the_schedule_of_sigma_is_that_of_the_regularizer():
    settings = GroupSparsity(sigma_start=10, sigma_end=2, exponent=0.3)
    figure = model_figures.draw_filter_sigma_schedule(settings, "moge")
    assert figure.caption.startswith("σ from 10 to 2 as in moge, whose γ is 0.3; T = 45,000")
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    assert {"γ = 0", "γ = 0.3", "γ = 1", "γ = 3"} <= set(lines)
    for name, points in lines.items():
        assert points[0][0] == 0 and points[-1][0] == 45_000 and points[-1][1] == pytest.approx(2)
        assert points[0][1] == (2 if name == "γ = 0" else 10)
    # linear for γ = 1; early for γ < 1, late above
    middle = {name: points[100][1] for name, points in lines.items()}
    assert middle["γ = 1"] == pytest.approx(6)
    assert middle["γ = 0.3"] == settings.sigma(0.5) < 6 < middle["γ = 3"]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_panels_have_one_scale_and_one_legend(layers):
    points = [charts.CurvePoint(x, 0.5, 0.4, 0.6) for x in (0.0, 0.1)]
    panels = {f"MoE {number}": {"vmoe": points} for number in range(layers)}
    figure = charts.panels_chart(panels, charts.ChartSpec("Change", "ε", "1 − IoU", share=True))
    seen = [axes for axes in figure.axes if axes.get_visible()]
    assert len(seen) == layers and len(figure.legends) == 1
    assert {axes.get_ylim() for axes in seen} == {seen[0].get_ylim()}


DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def whole():
    return explored.study()


@pytest.fixture(scope="module")
def page(whole):
    return explorer_page.render_study_explorer(whole)


def data_of(page: str) -> dict:
    return json.loads(DATA.search(page)[1])


def test_the_page_is_self_contained_and_the_same_every_time(whole, page):
    assert explorer_page.render_study_explorer(whole) == page
    assert not re.search(r"""(src|href|url|@import)\s*[=(]?\s*["']?\s*(https?:)?//""", page)
    assert re.findall(r'href="([^"]+)"', page) == ["index.html"]
    assert "<link" not in page and page.count("<script") == 2
    for found in data_of(page)["phases"]:
        assert [method["name"] for method in found["methods"]] == ["dense", "vmoe", "prc"]
        assert found["methods"][0] == {"name": "dense", "reason": explored.DENSE}


def test_what_models_share_is_there_once(whole, page):
    found = data_of(page)
    assert len(found["pool"]) == len(set(found["pool"]))
    one, other = (method["model"] for method in found["phases"][0]["methods"][1:])
    assert one["shown"][0]["picture"] == other["shown"][0]["picture"]
    attack = [variant["kind"] for variant in one["shown"]].index("attack")
    pictures = [model["shown"][attack]["picture"] for model in (one, other)]
    assert pictures[0] != pictures[1], "each its own attack"
    result = explored.first_explored(whole)
    assert found["pool"][one["shown"][2]["trace"]["layers"][1]] == result.shown[2].trace.layers[1]
    assert found["phases"][1]["methods"][1]["model"] == one, "the same measurement, the same places"


def test_epochs_come_from_the_training(page):
    methods = {method["name"]: method for method in data_of(page)["phases"][0]["methods"]}
    labels = [one["label"] for one in methods["prc"]["model"]["shown"] if one["kind"] == "epoch"]
    assert labels == ["epoch 1 of 10", "epoch 2 of 10"]
    assert not [one for one in methods["vmoe"]["model"]["shown"] if one["kind"] == "epoch"]


def explore(data, **phases) -> tuple[bool, str]:
    """Whether there are images to explore of these models of each phase, and the page."""
    found = StudyResults({name: explored.phase(data, one, name) for name, one in phases.items()})
    return explorer_page.has_explorer_results(found), explorer_page.render_study_explorer(found)


def test_epochs_of_other_images_are_left_out():
    model = subject(images(), moe())
    kept = explored.watched(model, 1)
    other = kept.model_copy(update={"images": (*kept.images[1:], kept.images[0])})
    _, page = explore(model.data, pretrain={"vmoe": explored.measured(model, watched=(other,))})
    shown = data_of(page)["phases"][0]["methods"][0]["model"]["shown"]
    assert {one["kind"] for one in shown} == {"clean", "noise", "attack", "augmentation"}


def test_what_there_is_to_explore():
    data = images()
    unmeasured = {"vmoe": model_with_results(trained(0, 0, True, "pretrain"))}
    has_images, page = explore(data, pretrain=unmeasured)
    assert not has_images and "the stage measure then writes" in page and "<script" not in page
    has_images, page = explore(data, pretrain={"dense": explored.skipped()})
    assert not has_images and "no method of this study has experts" in page
    assert "<script" not in page
    measured = {"vmoe": explored.measured(subject(data, moe()))}
    has_images, page = explore(data, pretrain=measured, finetune=unmeasured)
    assert has_images and [phase["name"] for phase in data_of(page)["phases"]] == ["pretrain"]


def test_four_hundred_experts_and_a_thousand_classes_stay_small():
    many = explored.alone(subject(images(classes=1000), moe(400)))
    assert len(explorer_page.render_study_explorer(many).encode()) < 1.5e6
