"""Prompts that name classes, against one image and one prompt at a time, and what it refuses."""

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.data.sources.digits import Digits
from moecore.data.text.tokenizers import tokenizer_in
from moecore.measure import zero_shot
from moecore.measure.base import at_once
from moecore.measure.zero_shot import ZeroShot
from moecore.report.column import opened
from moecore.report.measures.zero_shot import COLUMNS
from tests.measure.subjects import captioned

DIGITS = {"kind": "digits", "test_limit": 40}
TEMPLATES = ("{}", "top left : {}", "a picture of {}")


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory):
    return captioned(tmp_path_factory.mktemp("mosaics"))


@torch.no_grad()
def test_one_image_and_one_prompt_at_a_time(mosaics, tmp_path):
    settings = ZeroShot(source=DIGITS, templates=TEMPLATES)
    found = zero_shot.measure(mosaics, settings, at_once)
    model, task = mosaics.model, mosaics.data.task
    Digits(size=model.image.shape[0], test_limit=40).prepare(tmp_path)
    test = Prepared.open(tmp_path).test
    words = tokenizer_in(mosaics.data.folder, task)
    ends = []
    for digit in range(10):
        units = []
        for template in TEMPLATES:
            tokens = words.encode(template.format(digit), task.context).tokens
            embedding, _ = model.text(torch.tensor([tokens], dtype=torch.int32))
            units.append(embedding[0] / embedding[0].norm())
        ends.append(sum(units) / len(TEMPLATES))
    right, among = [], []
    for pixels, label in zip(test.images, test.labels, strict=True):
        side = model(torch.tensor(pixels[None]) / 255).prediction[0, :-1]
        near = sorted(range(10), key=lambda digit: -float(side @ ends[digit] / ends[digit].norm()))
        right.append(near[0] == label)
        among.append(label in near[:5])
    assert 0 < sum(right) < sum(among) < 40
    assert found.accuracy.value == pytest.approx(np.mean(right))
    assert found.top5.value == pytest.approx(np.mean(among))
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high
    assert opened(found.items) == pytest.approx(np.array(right, float), abs=1e-4)
    assert (found.images, found.templates, found.chance) == (40, 3, 0.1)
    assert [row.name for row in found.rows] == [str(digit) for digit in range(10)]
    assert sum(row.correct for row in found.rows) == sum(right)
    assert [row.images for row in found.rows] == np.bincount(test.labels, minlength=10).tolist()
    assert {row.unknown for row in found.rows} == {1}  # "picture"
    assert [column.value(found) for column in COLUMNS] == [found.accuracy, found.top5]


def test_other_words_for_the_classes(mosaics):
    digits = tuple(str(number) for number in range(10))
    source = Digits(test_limit=40)
    plain = zero_shot.measure(mosaics, ZeroShot(source=source, templates=("{}",)), at_once)
    turned = ZeroShot(source=source, templates=("{}",), names=digits[::-1])
    found = zero_shot.measure(mosaics, turned, at_once)
    assert [row.name for row in found.rows] == list(digits[::-1])
    assert [row.images for row in found.rows] == [row.images for row in plain.rows]
    assert found.items != plain.items


def test_few_classes_have_no_five_nearest(mosaics, tmp_path):
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        for number in range(10):
            pixels = np.full((12, 12), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    source = {"kind": "image_folder", "root": str(tmp_path), "size": 8, "channels": 1}
    found = zero_shot.measure(mosaics, ZeroShot(source=source), at_once)
    assert found.top5 is None and found.chance == 0.5


def test_what_is_refused(mosaics, tmp_path):
    with pytest.raises(UserError, match="found 3 names; allowed: 10, one a class"):
        settings = ZeroShot(source=DIGITS, names=("one", "two", "three"))
        zero_shot.measure(mosaics, settings, at_once)
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        for number in range(10):
            pixels = np.full((12, 12, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    coloured = {"kind": "image_folder", "root": str(tmp_path), "size": 8}
    with pytest.raises(UserError, match="found images of 3 channels; allowed: 1"):
        zero_shot.measure(mosaics, ZeroShot(source=coloured), at_once)
    for template in ("no place", "{} and {}", "{name}", "{"):
        with pytest.raises(ValidationError, match="allowed: one {}"):
            ZeroShot(source=DIGITS, templates=(template,))
