"""Every measurement of the table has the four names, and its results are read back."""

import pytest

from moecore.core.config import Config
from moecore.core.files import UserError, write_json
from moecore.core.plain import plain
from moecore.measure import MEASUREMENTS, routing
from moecore.measure.base import Skipped, Subject, at_once, read_result
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.layers.moe import MoE
from tests.measure.subjects import built, digits
from tests.measure.test_words import text
from tests.volumes import write_cohort

SMALL = {
    "routing": {"images": 8, "augmentations": ["flip"], "sweeps": {"k": [1], "images": 4}},
    "invariance": {"images": 4},
    "corruptions": {"images": 4, "severities": [1], "names": ["fog"]},
    "stability": {"images": 4, "steps": 2},
    "few_shot": {"shots": [1, 2, 1000], "draws": 2},
    "word_swaps": {"images": 4, "shares": [0.2]},
    "lipschitz": {"images": 2, "steps": 1, "halvings": 1, "lemma_tokens": 2},
    "explorer": {"images": 2, "gallery": 8, "favourites": 1, "attack": {"kind": "fgsm"}},
    "cost": {"batch": 2, "rounds": 2, "images": 2},
    "cohort_checks": {"resamples": 100, "years": 200},
}
MOE = MoE(
    router={"kind": "noisy_top_k", "k": 1},
    experts={"kind": "mlp", "number": 4, "hidden_ratio": 1},
    blocks=[0],
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    data = digits(tmp_path_factory.mktemp("digits"))
    model = built(Vit(patch=6, width=16, depth=1, heads=2), MOE, data, 3)
    return {
        "flat": Subject(model, data),
        "volumes": volumes(tmp_path_factory.mktemp("cohort")),
        "text": words(tmp_path_factory.mktemp("text")),
    }


def volumes(folder) -> Subject:
    cohort = write_cohort(folder, simulated=False)
    return Subject(built(Vit3d(patch=8, width=8, depth=1, heads=1), None, cohort, 1), cohort)


def words(folder) -> Subject:
    data = text(folder / "words")
    return Subject(built(LanguageModel(width=8, depth=1, heads=1, span=6), None, data, 1), data)


@pytest.mark.parametrize("what", MEASUREMENTS)
def test_settings_have_the_name_of_the_file(what):
    name = "".join(word.title() for word in what.split("_"))
    settings = MEASUREMENTS[what].settings
    assert (settings.__name__, settings.__module__) == (name, f"moecore.measure.{what}")
    assert issubclass(settings, Config)


@pytest.mark.parametrize("what", MEASUREMENTS)
def test_results_are_read_back_as_they_were_written(what, subjects, tmp_path):
    measurement = MEASUREMENTS[what]
    subject = subjects[{"cohort_checks": "volumes", "word_swaps": "text"}.get(what, "flat")]
    assert measurement.applies(subject) is None
    settings = measurement.settings.model_validate(SMALL[what])
    result = measurement.measure(subject, settings, at_once)
    assert type(result) is measurement.result
    write_json(tmp_path / "0.json", plain(result))
    assert read_result(tmp_path / "0.json", measurement.result, what) == result


def test_a_result_of_other_code_is_refused(tmp_path):
    path = tmp_path / "0.json"
    write_json(path, {"images": 4, "accuracy": 0.5})
    with pytest.raises(UserError) as refused:
        read_result(path, routing.Result, "routing")
    text = str(refused.value)
    assert text.startswith(f"{path}: written by other code (border_load: Field required)")
    assert text.endswith("; run `dvc repro routing`")


def test_why_something_was_skipped_is_read_back(tmp_path):
    write_json(tmp_path / "0.json", plain(Skipped(skipped="no routing")))
    found = read_result(tmp_path / "0.json", routing.Result, "routing")
    assert found == Skipped(skipped="no routing")


def test_a_dense_model_is_skipped_where_routing_is_measured(subjects):
    data = subjects["flat"].data
    dense = Subject(built(SingleLayer(), None, data, 1), data)
    skipped = {what for what, found in MEASUREMENTS.items() if found.applies(dense)}
    assert skipped == {"routing", "invariance", "explorer", "cohort_checks", "word_swaps"}
