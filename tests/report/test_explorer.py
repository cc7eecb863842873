"""The explorer's page as a text: what is in it, once, and safely."""

import json
import re

import pytest

from moecore.measure.explorer import Result as Explorer
from moecore.report.explorer import NO_EXPERTS, NOT_MEASURED, explorable, explorer
from moecore.report.measured import Measured
from moecore.training.outcome import Outcome
from tests.measure.subjects import NASTY, images, moe, subject
from tests.report.explored import DENSE, alone, measured, phase, results, skipped, study, watched
from tests.report.generated import trained

DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def whole():
    return study()


@pytest.fixture(scope="module")
def page(whole):
    return explorer(whole)


def data_of(page: str) -> dict:
    return json.loads(DATA.search(page)[1])


def test_the_page_is_self_contained_and_the_same_every_time(whole, page):
    assert explorer(whole) == page
    assert not re.search(r"""(src|href|url|@import)\s*[=(]?\s*["']?\s*(https?:)?//""", page)
    assert re.findall(r'href="([^"]+)"', page) == ["index.html"]
    assert "<link" not in page and page.count("<script") == 2


def test_names_from_folders_are_never_markup(page):
    assert NASTY not in page
    assert data_of(page)["phases"][0]["answers"][0] == NASTY


def test_every_method_is_listed_and_the_dense_one_says_why(page):
    for found in data_of(page)["phases"]:
        assert [method["name"] for method in found["methods"]] == ["dense", "vmoe", "prc"]
        assert found["methods"][0] == {"name": "dense", "reason": DENSE}


def test_what_models_share_is_there_once(whole, page):
    found = data_of(page)
    assert len(found["pool"]) == len(set(found["pool"]))
    one, other = (method["model"] for method in found["phases"][0]["methods"][1:])
    assert one["shown"][0]["picture"] == other["shown"][0]["picture"]
    assert one["shown"][3]["picture"] != other["shown"][3]["picture"], "each its own attack"
    result = whole.phases["pretrain"].first(Explorer)["vmoe"]
    assert found["pool"][one["shown"][2]["trace"]["layers"][1]] == result.shown[2].trace.layers[1]
    assert found["phases"][1]["methods"][1]["model"] == one, "the same measurement, the same places"


def test_epochs_come_from_the_training(page):
    methods = {method["name"]: method for method in data_of(page)["phases"][0]["methods"]}
    labels = [one["label"] for one in methods["prc"]["model"]["shown"] if one["kind"] == "epoch"]
    assert labels == ["epoch 1 of 10", "epoch 2 of 10"]
    assert not [one for one in methods["vmoe"]["model"]["shown"] if one["kind"] == "epoch"]


def test_epochs_of_other_images_are_left_out():
    model = subject(images(), moe())
    kept = watched(model, 1)
    other = kept.model_copy(update={"images": (*kept.images[1:], kept.images[0])})
    found = data_of(
        explorer(
            results({"pretrain": phase(model.data, {"vmoe": measured(model, watched=(other,))})})
        )
    )
    shown = found["phases"][0]["methods"][0]["model"]["shown"]
    assert {one["kind"] for one in shown} == {"clean", "noise", "attack", "augmentation"}


def test_a_study_without_the_measurement_says_which_stage_writes_it():
    models = {"vmoe": Measured({Outcome: trained(0, 0, True, "pretrain")})}
    found = results({"pretrain": phase(images(), models)})
    assert not explorable(found)
    page = explorer(found)
    assert "the stage measure then writes" in NOT_MEASURED
    assert "run.measurements of params.yaml" in page and "<script" not in page


def test_a_study_of_dense_models_has_nothing_to_see():
    found = results({"pretrain": phase(images(), {"dense": skipped()})})
    assert not explorable(found)
    page = explorer(found)
    assert NO_EXPERTS in page and "<script" not in page


def test_a_phase_that_was_not_measured_is_left_out():
    data = images()
    whole = results(
        {
            "pretrain": phase(data, {"vmoe": measured(subject(data, moe()))}),
            "finetune": phase(data, {"vmoe": Measured({Outcome: trained(0, 0, True, "finetune")})}),
        }
    )
    assert [found["name"] for found in data_of(explorer(whole))["phases"]] == ["pretrain"]
    assert explorable(whole)


def test_four_hundred_experts_and_a_thousand_classes_stay_small():
    many = alone(subject(images(classes=1000), moe(400)))
    assert len(explorer(many).encode()) < 1.5e6
