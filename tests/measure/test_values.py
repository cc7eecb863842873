"""Metrics and their values: what is put comes back, over kills and from a file, as columns too."""

import json

import numpy as np
import pytest
import torch

from moecore.core.files import UserError, to_jsonable, write_json
from moecore.measure.base import MeasuredModel, Measurement, find_measurement, read_result
from moecore.measure.values import Found, Metric, OnPage, Values, place_slug
from moecore.nn.backbones.vit import Vit
from moecore.report.column import ColumnContext, MetricColumns, PlannedPhase
from moecore.report.results import list_displays, list_measurements_with_values
from moecore.statistics.comparisons import encode_item_values
from moecore.statistics.intervals import bootstrap_mean, wilson
from moecore.testing import check_measurement
from moecore.testing.check_helpers import CLASSES, small_data, small_vit
from moecore.training.method import Method
from tests.measure.subjects import compute_without_cache

HITS = np.array([1.0, 0, 1, 1])


class Weather(Measurement):
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
    return Weather().collect_result(MeasuredModel(small_vit(), small_data()), compute_without_cache)


def test_a_value_is_the_mean_of_its_items_with_the_interval_of_its_metric():
    found = weather()
    assert found.find("wet").interval == wilson(3, 4)
    assert found.find("wet").items == encode_item_values(HITS)
    assert found.find("wind", side="north").interval == bootstrap_mean(5 * HITS)
    score = found.find("score", side="north").interval
    assert score == CLASSES.interval(torch.from_numpy(HITS))
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
    assert len(out.values[0].array) == 2


def test_columns_stand_in_the_order_of_the_metrics_and_details_of_places_at_the_end():
    seen = ColumnContext(CLASSES, [weather()], "", (), ())
    columns = MetricColumns("weather", Weather).columns(seen)
    assert [(one.name, one.label) for one in columns] == [
        ("wet", "Wet"),
        ("wind", "Wind, mean"),
        ("accuracy_in_north", "Accuracy in north"),
        ("accuracy_in_far_east", "Accuracy in far east"),
        ("wind_north", "Wind, north"),
        ("wind_far_east", "Wind, far east"),
    ]
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
        read_result(tmp_path / "0.json", Found, "measure")


TIMED = "cost"  # is never the same twice
NAMES = [name for name in list_measurements_with_values() if name != TIMED]
ATTACKED = {  # has no settings of its own accord
    "images": 4,
    "epsilons": [0.0, 0.1, 0.05],
    "attacks": [{"kind": "fgsm"}, {"kind": "pgd", "steps": 1}],
    "audit": {"images": 2, "steps": 1},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_a_metric_and_every_column_was_planned(name):
    kind = find_measurement(name)
    subject = MeasuredModel(small_vit(), small_data())
    if kind.applies(subject):
        pytest.skip(f"{name} needs other data; its own tests measure it")
    settings = kind.model_validate(ATTACKED if name == "robustness" else {})
    found = check_measurement(settings, subject)
    assert json.loads(json.dumps(to_jsonable(found))) == found.model_dump(mode="json")
    assert {value.metric for value in found.values} <= set(kind.metrics)
    task = subject.data.task
    seen = ColumnContext(task, [found], "", (), ())
    columns = next(one.columns for one in list_displays() if one.kind is kind)
    named = columns.columns(seen)
    assert len({column.name for column in named}) == len(named)
    planned = columns.foreseen(PlannedPhase(_StudyOf(name, settings), "accuracy", "pretrain"))
    filled = {column.name for column in named if column.read_result(found) is not None}
    assert filled <= set(planned)


class _StudyOf:
    """Stands for a study with one section and one method, whose last two blocks are MoE layers."""

    def __init__(self, name: str, settings: Measurement) -> None:
        setattr(self, name, settings)
        self.model = Vit(patch=2, width=8, depth=4, heads=2)
        experts = {"kind": "mlp", "number": 4}
        self.methods = {"vmoe": Method(router={"kind": "noisy_top_k"}, experts=experts)}
        self.run = type("Run", (), {"methods": ("vmoe",)})
