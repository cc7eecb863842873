"""What a model knows of its images, from cards of images and of volumes."""

import pytest
from pydantic import ValidationError

from moecore.backbones.image import ImageSpec

VOLUMES = {"channels": 1, "size": [32, 48, 32], "classes": [], "mean": [0.4], "std": [0.2], "labels": "real", "target": "age", "target_mean": 61.5, "target_std": 17.0}
IMAGES = {"channels": 3, "size": 32, "classes": ["cat", "dog"], "mean": [0.4] * 3, "std": [0.2] * 3}


def test_a_card_of_volumes_gives_three_axes_and_one_output():
    spec = ImageSpec.from_card(VOLUMES)
    assert spec.shape == (32, 48, 32) and spec.outputs == 1 and spec.answers == ("age",)
    assert (spec.target_mean, spec.target_std) == (61.5, 17.0)
    assert ImageSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_card_of_images_gives_two_axes_and_an_output_per_class():
    spec = ImageSpec.from_card(IMAGES)
    assert spec.shape == (32, 32) and spec.outputs == 2 and spec.answers == ("cat", "dog") and spec.target is None


@pytest.mark.parametrize("change", [{"classes": ["one"]}, {"classes": []}, {"target": "age"}, {"size": 0}, {"size": [4, 4]}, {"size": [4, 0, 4]}])
def test_neither_both_nor_nothing(change):
    with pytest.raises((ValidationError, KeyError)):
        ImageSpec.from_card(IMAGES | change)


def test_a_target_needs_a_deviation():
    with pytest.raises(ValidationError, match="target_std"):
        ImageSpec.from_card(VOLUMES | {"target_std": 0.0})
