import json

import numpy as np
import pytest
import torch

from moecore.backbones import SingleLayer, Vit
from moecore.core.files import UserError, to_jsonable, write_json
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure import AffineRanges, Routing, ViewSettings, base
from moecore.measure.routing_metrics.expert_profiles import overlay_middle_slices, parse_expert_grid
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.measure.values import Found, Metric, OnPage, Values, place_slug
from moecore.nn.predict import predict_in_batches
from moecore.report.column import ColumnContext, MetricColumns, PhaseBeforeRun
from moecore.report.results_and_displays import list_displays, list_measurements_with_values
from moecore.statistics.comparisons import encode_item_values
from moecore.statistics.intervals import bootstrap_mean, wilson
from moecore.testing import check_measurement
from moecore.testing.check_helpers import CLASSES, small_data, small_vit
from moecore.training.method import Method
from tests.measure.subjects import built, compute_without_cache

ELSEWHERE = {"cohort_checks", "word_swaps", "retrieval", "zero_shot", "truth"}  # their subjects
HITS = np.array([1.0, 0, 1, 1])
ROUTING = Routing.model_validate(
    {"images": 12, "overlays": 3, "views": {"shift": 2, "flip": True, "affine": {"degrees": 10}}}
    | {"augmentations": "identity noise shift flip rotation affine".split()}
    | {"augmentation_images": 6, "sweeps": {"k": [1, 2], "threshold": [], "images": 8}}
)
TIMED = "cost"  # is never the same twice
NAMES = [name for name in list_measurements_with_values() if name != TIMED]
ATTACKED = {  # has no settings of its own accord
    "images": 4,
    "epsilons": [0.0, 0.1, 0.05],
    "attacks": [{"kind": "fgsm"}, {"kind": "pgd", "steps": 1}],
    "audit": {"images": 2, "steps": 1},
}


def test_what_is_skipped_says_why_and_a_dense_model_has_no_routing(tmp_path, data):
    write_json(tmp_path / "0.json", to_jsonable(base.SkipReason(skipped="no routing")))
    found = base.read_result(tmp_path / "0.json", Found, "routing")
    assert found == base.SkipReason(skipped="no routing")
    dense = base.MeasuredModel(built(SingleLayer(), None, data, 1), data)
    skipped = {what for what, found in base.builtin_measurements().items() if found.applies(dense)}
    routed = {"routing", "invariance", "explorer"}
    routed |= {"expert_worth", "fewer_experts", "router_regret", "routing_certificate"}
    assert skipped == routed | ELSEWHERE


@pytest.fixture(scope="module")
def subject(aged) -> base.MeasuredModel:
    return aged["moe"]


@pytest.fixture(scope="module")
def found(subject) -> Found:
    return check_measurement(ROUTING, subject)


@pytest.mark.parametrize("what", ["invariance", "corruptions", "stability", "lipschitz"])
def test_measurements_of_flat_images_do_not_apply(subject, what):
    assert "volumes" in base.find_measurement(what).applies(subject)


def test_routing_of_volumes(found):
    assert len(found.curve("load_cv2_layer", "layer")) == 2
    rows = found.curve("match_top1_augmented", "augmentation")
    assert list(rows) == ["identity", "noise", "shift", "flip", "rotation", "affine"]
    assert rows["identity"] == 1
    # every cube of every volume has its partner
    assert 0 < found.find("match_top1").value <= 1
    assert found.facts["overlays"]["shape"] == [3, 1, 16, 16]


def test_the_sweeps_own_setting_has_the_models_error(subject, found):
    where = evenly_spaced_indices(40, 12)[evenly_spaced_indices(12, 8)]
    test = subject.data.test
    predicted = predict_in_batches(subject.model, test.images[where], 5)[0][:, 0].numpy()
    errors = np.abs(predicted - test.labels[where])
    assert found.find("score_k", k=1).value == pytest.approx(float(errors.mean()), rel=1e-5)


def test_mid_slices_by_hand():
    # One volume of 4 × 2 × 6 voxels in cubes of 2: a grid of 2 × 1 × 3; the middle row of cubes
    # along the last axis holds voxels 2 and 3.
    volume = np.zeros((1, 1, 4, 2, 6), np.float16)
    # (right, anterior) of the shown slice
    volume[0, 0, :, :, 3] = np.array([[0.0, 0.2], [0.4, 0.6], [0.8, 1.0], [0.0, 0.0]])
    layout = TokenLayout(special=1, grid=(2, 1, 3), size=(4, 2, 6))
    combine = torch.zeros(1, 7, 5)
    combine[0, 1 + 1, 4] = combine[0, 1 + 4, 2] = 1  # cubes (0, 0, 1) and (1, 0, 1) alone
    found = overlay_middle_slices(volume, (RoutingRecord(*[combine] * 5),), layout)
    assert found.shape == (1, 1, 2, 4) and found.experts == 5
    # anterior up, right to the right
    assert found.images()[0, 0].tolist() == [[51, 153, 255, 0], [0, 102, 204, 0]]
    assert parse_expert_grid(found.grids[0][0]).tolist() == [[4, 2]]
    special = combine.clone()
    special[0, 0] = 9  # the class token's expert is not shown
    assert overlay_middle_slices(volume, (RoutingRecord(*[special] * 5),), layout) == found


def test_noise_leaves_the_background_of_volumes():
    volumes = np.zeros((2, 1, 8, 8, 8), np.float16)
    volumes[:, :, 2:6, 2:6, 2:6] = 0.5
    views = draw_two_views(volumes, TwoViewAugmentation(name="noise", noise=0.1), 0)
    assert views.images.shape == (4, 1, 8, 8, 8) and views.affines.shape == (4, 4, 4)
    assert (views.images[:, :, 0] == 0).all() and torch.equal(views.affines[0], torch.eye(4))
    assert float(views.images[:, :, 2:6, 2:6, 2:6].std()) == pytest.approx(0.1, rel=0.2)
    assert not torch.equal(views.images[0], views.images[2]), "two views of a volume differ"
    turned = ViewSettings(affine=AffineRanges(degrees=20))
    moved = draw_two_views(volumes, TwoViewAugmentation(name="turned", views=turned), 0)
    assert not torch.equal(moved.affines[0], moved.affines[2])


def test_people_with_several_sessions_are_one_item(subject, found):
    test = subject.data.test
    names = [row["participant_id"] for row in subject.data.subjects("test")]
    assert len(test.people) == len(names) > len(set(names))
    assert len(set(zip(test.people.tolist(), names, strict=True))) == len(set(names))
    shown = test.people_at(evenly_spaced_indices(len(names), 12))
    few = shown[evenly_spaced_indices(12, 6)]
    for one in found.values:
        if one.items:
            assert len(one.item_values) == len(
                set((few if "augmentation" in one.at else shown).tolist())
            )
            assert one.item_values.mean() == pytest.approx(one.value, abs=1e-6)


class Weather(base.Measurement):
    """Which winds blow."""

    metrics = {
        "wet": Metric("Wet", "lower", "share", note="of images"),
        "wind": Metric("Wind, {}", "higher", over="side", mean="Wind, mean", detail=True),
        "score": Metric("{score} in {}{unit}", "score", "score", over="side", name="{score}_in_{}"),
    }
    page = OnPage("weather")
    winds: tuple[str, ...] = ("north", "far east")

    def places(self):
        return {"side": self.winds}

    def measure(self, subject, out):
        out.put("wet", HITS)
        for wind in self.winds:
            out.piece(wind, lambda part, wind=wind: part.put("wind", HITS * len(wind), side=wind))
            out.put("score", torch.from_numpy(HITS), side=wind)
        out.put("wind", 7.0, layer=1)
        out.put("wet", None)
        out.put("wet", float("nan"))
        out.facts["map"] = torch.tensor([1.0, np.nan])


def weather() -> Found:
    measured = base.MeasuredModel(small_vit(), small_data())
    return Weather().collect_result(measured, compute_without_cache)


def test_a_value_is_the_mean_of_its_items_with_the_interval_of_its_metric():
    found = weather()
    assert found.find("wet").interval == wilson(3, 4)
    assert found.find("wet").items == encode_item_values(HITS)
    assert found.find("wind", side="north").interval == bootstrap_mean(5 * HITS)
    assert found.find("score", side="north").interval == CLASSES.interval(torch.from_numpy(HITS))
    assert found.facts == {"map": [1.0, None]}
    assert found.curve("wind", "side") == {"north": 3.75, "far east": 6.0}
    assert len(found.all("wet")) == 1, "neither None nor what is not finite"
    assert found.numbers()["wind_far_east"] == 6
    places = ("translation (0, 0.1)", 0.05, 3)
    assert [place_slug(place) for place in places] == ["translation_0_0_1", "0_05", "3"]


def test_a_signed_metric_has_an_interval_below_0_and_people_are_drawn_whole():
    out = Values({"gain": Metric("Gain", signed=True)}, CLASSES, compute_without_cache)
    out.put("gain", -HITS)
    assert out.values[0].low < out.values[0].high < 0
    out = Values({"error": Metric("Error")}, CLASSES, compute_without_cache)
    out.people = np.repeat([0, 1], 4)
    errors = np.arange(8.0)
    out.put("error", errors)
    assert out.values[0].interval == bootstrap_mean(errors, people=out.people)
    assert out.values[0].interval != bootstrap_mean(errors), "as if all were other people"
    assert len(out.values[0].item_values) == 2


def test_columns_stand_in_the_order_of_the_metrics_and_details_of_places_at_the_end():
    seen = ColumnContext(CLASSES, [weather()], "", (), ())
    columns = MetricColumns("weather", Weather).columns(seen)
    labels = {"wet": "Wet", "wind": "Wind, mean", "accuracy_in_north": "Accuracy in north"}
    labels |= {"accuracy_in_far_east": "Accuracy in far east", "wind_north": "Wind, north"}
    labels |= {"wind_far_east": "Wind, far east"}
    assert [(one.name, one.label) for one in columns] == list(labels.items())
    assert [one.note for one in columns[:2]] == ["of images", "; mean over sides"]
    assert columns[1].read_result(weather()) == 4.875
    np.testing.assert_allclose(columns[1].read_items(weather()), 6.5 * HITS, atol=1e-2)
    assert columns[4].read_result(weather()) == bootstrap_mean(5 * HITS)
    assert columns[4].read_result(Found(values=())) is None
    assert (columns[2].better, columns[2].form, columns[2].limits) == ("higher", "share", "wilson")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([{"metric": "imed"}], "values.0.value: Field required"),
        (None, "values: Input should be"),
        ([{"metric": "imed", "value": None}], "values.0.value: Input should be"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, values, told):
    write_json(tmp_path / "0.json", {"values": values})
    with pytest.raises(UserError, match=f"older version .*{told}[^\n]*run `dvc repro measure`$"):
        base.read_result(tmp_path / "0.json", Found, "measure")


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_a_metric_and_every_column_was_planned(name):
    kind = base.find_measurement(name)
    subject = base.MeasuredModel(small_vit(), small_data())
    if kind.applies(subject):
        pytest.skip(f"{name} needs other data; its own tests measure it")
    settings = kind.model_validate(ATTACKED if name == "robustness" else {})
    found = check_measurement(settings, subject)
    assert json.loads(json.dumps(to_jsonable(found))) == found.model_dump(mode="json")
    assert {value.metric for value in found.values} <= set(kind.metrics)
    seen = ColumnContext(subject.data.task, [found], "", (), ())
    columns = next(one.columns for one in list_displays() if one.kind is kind)
    named = columns.columns(seen)
    assert len({column.name for column in named}) == len(named)
    planned = columns.planned(PhaseBeforeRun(_StudyOf(name, settings), "accuracy", "pretrain"))
    filled = {column.name for column in named if column.read_result(found) is not None}
    assert filled <= set(planned)


class _StudyOf:
    """Stands for a study with one section and one method, whose last two blocks are MoE layers."""

    def __init__(self, name: str, settings: base.Measurement) -> None:
        setattr(self, name, settings)
        self.model = Vit(patch=2, width=8, depth=4, heads=2)
        experts = {"kind": "mlp", "number": 4}
        self.methods = {"vmoe": Method(router={"kind": "noisy_top_k"}, experts=experts)}
        self.run = type("Run", (), {"methods": ("vmoe",)})
