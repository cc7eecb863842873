"""What a model knows of its images, from cards of images and of volumes."""

import pytest
from pydantic import ValidationError

from moecore.nn.backbones.image import ImageSpec
from moecore.tasks.classification import Classification
from moecore.tasks.regression import Regression

VOLUMES = {
    "channels": 1,
    "size": [32, 48, 32],
    "mean": [0.4],
    "std": [0.2],
    "task": {"kind": "regression", "target": "age", "mean": 61.5, "deviation": 17.0},
    "name": "of no interest",
}
IMAGES = {
    "channels": 3,
    "size": 32,
    "mean": [0.4] * 3,
    "std": [0.2] * 3,
    "task": {"kind": "classification", "classes": ["cat", "dog"]},
}


def test_a_card_of_volumes_gives_three_axes_and_one_output():
    spec = ImageSpec.from_card(VOLUMES)
    assert spec.shape == (32, 48, 32)
    assert spec.outputs == 1
    assert spec.answers == ("age",)
    assert spec.task == Regression(target="age", mean=61.5, deviation=17.0)
    assert ImageSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_card_of_images_gives_two_axes_and_an_output_per_class():
    spec = ImageSpec.from_card(IMAGES)
    assert spec.shape == (32, 32)
    assert spec.outputs == 2
    assert spec.answers == ("cat", "dog")
    assert spec.task == Classification(classes=("cat", "dog"))


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"kind": "classification", "classes": ["one"]}},
        {"task": {"kind": "classification"}},
        {"task": {"kind": "captioning"}},
        {"task": {"kind": "regression", "target": "age", "deviation": 0.0}},
        {"task": {"kind": "regression"}},
        {"size": 0},
        {"size": [4, 4]},
        {"size": [4, 0, 4]},
    ],
)
def test_what_is_no_card_is_refused(change):
    with pytest.raises(ValidationError):
        ImageSpec.from_card(IMAGES | change)


def test_a_card_without_a_task_is_refused():
    with pytest.raises(KeyError, match="task"):
        ImageSpec.from_card({key: value for key, value in IMAGES.items() if key != "task"})
