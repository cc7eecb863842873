"""Images and captions in one space: losses against sums written out, recall with ties, by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.core.streams import Draws, generator_for
from moecore.tasks.image_text import NONE, ImageText
from moecore.tasks.recall import image_to_text, text_to_image

TASK = ImageText(words=9, context=4, captions=2, end=2, vocabulary="0" * 64, width=3)
SIGMOID = TASK.model_copy(update={"pairs": "sigmoid"})


def images_of(units, scale=5.0, bias=0.0) -> torch.Tensor:
    units = torch.nn.functional.normalize(torch.as_tensor(units, dtype=torch.float32), dim=-1)
    return torch.cat([scale * units, torch.full((len(units), 1), bias)], dim=1)


def texts_of(units, marks=None, there=None) -> torch.Tensor:
    """(B, C, d) to text sides; captions are different unless marks say otherwise."""
    units = torch.nn.functional.normalize(torch.as_tensor(units, dtype=torch.float32), dim=-1)
    shape = units.shape[:-1]
    if marks is None:
        marks = torch.arange(math.prod(shape)).view(shape)
    marks = torch.stack([marks, marks], dim=-1).float()
    there = torch.ones(shape) if there is None else there.float()
    return torch.cat([units * there[..., None], there[..., None], marks], dim=-1)


def drawn(seed, batch, captions=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, generator=generator)
    return images, torch.randn(batch, captions, 3, generator=generator)


@given(st.integers(1, 6), st.integers(0, 99))
def test_the_loss_is_the_mean_of_both_cross_entropies(batch, seed):
    images, texts = (images_of(drawn(seed, batch)[0]), texts_of(drawn(seed, batch)[1]))
    logits = (images[:, :-1] @ texts[:, 0, :3].T).tolist()
    total = 0.0
    for i in range(batch):
        row = math.log(sum(math.exp(logits[i][j]) for j in range(batch))) - logits[i][i]
        column = math.log(sum(math.exp(logits[j][i]) for j in range(batch))) - logits[i][i]
        total += (row + column) / 2 / batch
    assert float(TASK.loss(images, texts)) == pytest.approx(total, abs=1e-5)


@given(st.integers(1, 6), st.integers(0, 99))
def test_the_sigmoid_loss_is_the_sum_over_all_pairs(batch, seed):
    images = images_of(drawn(seed, batch)[0], scale=2.0, bias=-3.0)
    texts = texts_of(drawn(seed, batch)[1])
    total = 0.0
    for i in range(batch):
        for j in range(batch):
            logit = float(images[i, :-1] @ texts[j, 0, :3]) - 3.0
            total += math.log1p(math.exp(-logit if i == j else logit)) / batch
    assert float(SIGMOID.loss(images, texts)) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("task", [TASK, SIGMOID])
def test_one_caption_of_two_images_is_no_wrong_answer(task):
    # Images 0 and 1 have the same caption: with each other left out, each sees 2 alone.
    images, texts = drawn(1, 3)
    texts[1] = texts[0]
    sides = texts_of(texts, marks=torch.tensor([[7], [7], [8]]))
    found = task.loss(images_of(images), sides, reduction="none")
    pair = images_of(images[[0, 2]]), texts_of(texts[[0, 2]])
    assert found[0] == pytest.approx(float(task.loss(*pair, reduction="none")[0]), abs=1e-5)
    assert found.isfinite().all()


def test_captions_that_are_not_there_count_for_nothing():
    images, texts = drawn(2, 4, captions=2)
    there = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    found = TASK.loss(images_of(images), texts_of(texts, there=there), reduction="none")
    first = TASK.loss(images_of(images), texts_of(texts[:, :1]), reduction="none")
    rest = [0, 2, 3]
    second = TASK.loss(images_of(images[rest]), texts_of(texts[rest, 1:]), reduction="none")
    assert found[1] == pytest.approx(float(first[1]), abs=1e-5)
    torch.testing.assert_close(found[rest], (first[rest] + second) / 2)


def test_recall_by_hand():
    # Axes x, y, z for images 0, 1, 2. Captions of 0: x (finds 0) and y (finds 1); of 1: z; of 2: z.
    images = images_of(torch.eye(3))
    x, y, z = torch.eye(3)
    texts = texts_of(torch.stack([torch.stack([x, y]), torch.stack([z, z]), torch.stack([z, z])]))
    found = text_to_image(images, texts, (1, 2, 3))
    # y is 0 from images 0 and 2, which are level behind 1: places 2 and 3, half of the orders hit
    assert found[0].tolist() == [0.5, 0.75, 1.0]
    # z finds image 2 first; image 1 is level with 0 behind it
    assert found[1].tolist() == [0.0, 0.5, 1.0]
    assert found[2].tolist() == [1.0, 1.0, 1.0]
    back = image_to_text(images, texts, (1, 2, 5))
    assert back[0].tolist() == [1.0, 1.0, 1.0]
    assert back[2, 0] == pytest.approx(1 / 3)  # its caption z is level with the two of image 1
    # image 1: y of image 0 is above, its own z (0) is level with x and the two z of image 2
    assert back[1].tolist() == pytest.approx([0.0, 1 / 4, 1.0])


def test_two_images_with_one_caption_share_the_hit_whichever_comes_first():
    images = images_of([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    texts = texts_of([[[1.0, 0, 0]], [[1, 0, 0]], [[0, 1, 0]]])
    assert TASK.scores(images, texts).tolist() == [0.5, 0.5, 1.0]
    flipped = TASK.scores(images.flip(0), texts.flip(0))
    assert flipped.tolist() == [1.0, 0.5, 0.5]


@given(st.integers(2, 7), st.integers(1, 3), st.integers(0, 50))
def test_recall_is_that_of_sorting(images, captions, seed):
    left, right = drawn(seed, images, captions)
    sides, texts = images_of(left), texts_of(right)
    said = torch.nn.functional.normalize(left, dim=1) @ (
        torch.nn.functional.normalize(right, dim=-1).flatten(0, 1).T
    )
    for k in (1, 2):
        first = said.argsort(dim=0, descending=True)[:k]  # (k, captions)
        owner = torch.arange(images).repeat_interleave(captions)
        expected = (first == owner).any(dim=0).double().view(images, captions).mean(dim=1)
        torch.testing.assert_close(text_to_image(sides, texts, (k,))[:, 0], expected)
        best = said.argsort(dim=1, descending=True)[:, :k]
        expected = (owner[best] == torch.arange(images)[:, None]).any(dim=1).double()
        torch.testing.assert_close(image_to_text(sides, texts, (k,))[:, 0], expected)


def test_an_attack_compares_with_the_captions_of_all_and_not_of_the_batch():
    images, texts = drawn(3, 5, captions=2)
    sides, texts = images_of(images), texts_of(texts)
    bound = TASK.among(texts)
    whole = bound.attack_loss(sides, texts)
    parts = [bound.attack_loss(sides[i : i + 1], texts[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(parts), whole)
    logits = sides[:, :-1] @ texts.flatten(0, 1)[:, :3].T
    own = logits.view(5, 5, 2)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(whole, logits.logsumexp(1) - own.logsumexp(1))
    assert TASK.attack_loss(sides[:1], texts[:1]) == pytest.approx(0.0, abs=1e-6)


def test_a_step_draws_one_caption_of_each_that_is_there():
    labels = torch.full((200, 2, 4), NONE)
    labels[:, 0] = 3
    labels[:100, 1] = 4
    chosen = TASK.drawn(labels, Draws(generator_for(0, 0), 200))
    assert chosen.shape == (200, 4) and (chosen[100:] == 3).all()
    assert 25 < int((chosen[:100, 0] == 4).sum()) < 75
    again = TASK.drawn(labels[50:60], Draws(generator_for(0, 0), 200, torch.arange(50, 60)))
    assert torch.equal(again, chosen[50:60])


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.zeros((2, 1, 4), int), r"shape \(2, 1, 4\); allowed: \(images, 2, 4\)"),
        (np.full((2, 2, 4), -1), "image 0 has no caption; allowed: one at least"),
        (np.full((1, 2, 4), 9), "run from 9 to 9; allowed: 0 to 8"),
        (np.full((1, 2, 4), 3), "a caption does not end; allowed: token 2"),
    ],
)
def test_labels_that_are_no_captions_are_refused(labels, says):
    with pytest.raises(UserError, match=says):
        TASK.check(labels, "labels")


def test_shapes_that_do_not_fit_are_refused():
    images, texts = drawn(0, 3)
    with pytest.raises(ValueError, match="image_text: predictions"):
        TASK.loss(images_of(images), texts_of(texts)[:2])
