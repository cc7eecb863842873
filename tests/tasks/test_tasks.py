import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.core.streams import BatchDraws, generator_for
from moecore.tasks import Cells, Classification, MultiLabel, NextToken, Regression, image_text
from moecore.tasks.image_text import (
    NO_CAPTION,
    ImageText,
    image_to_text_recall,
    text_to_image_recall,
)
from moecore.testing import check_task

ONE = Classification(classes=("a", "b", "c"))
SETS = MultiLabel(classes=("a", "b", "c"))
AGE = Regression(target="age", unit="years", mean=50.0, deviation=20.0)
MOSAIC = Cells(classes=("a", "b", "c"), grid=2)

# Logits ln p of probabilities p: the best classes of the four images are 0, 2, 1, 1.
PROBS = torch.tensor([[0.5, 0.2, 0.3], [0.3, 0.2, 0.5], [0.2, 0.7, 0.1], [0.1, 0.6, 0.3]])
LOGITS = PROBS.log()
CLASSES = torch.tensor([0, 1, 1, 2])  # right, wrong, right, wrong
LABELS = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.uint8)
AGES = torch.tensor([40.0, 50.0, 60.0, 80.0])
SAID = torch.tensor([[44.0], [50.0], [54.0], [70.0]])  # errors 4, 0, −6, −10
# Two mosaics: the four images as the cells of each, once in another order.
MIXED = LOGITS[[2, 0, 1, 3]]
MOSAICS = torch.stack([LOGITS, MIXED]).flatten(1), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
WORDS = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5), dtype=torch.int32)
TASK = ImageText(words=9, context=4, captions=2, end=2, vocabulary="0" * 64, width=3)
SIGMOID = TASK.model_copy(update={"pairs": "sigmoid"})


def test_what_a_head_answers():
    assert (ONE.outputs, ONE.answers) == (3, ("a", "b", "c"))
    assert (SETS.outputs, SETS.answers) == (3, ("a", "b", "c"))
    assert (AGE.outputs, AGE.answers) == (1, ("age",)) and AGE.classes == ()
    for task in (ONE, SETS):
        assert task.head == (0.0, 1.0) and task.predict(LOGITS) is LOGITS
    assert AGE.head == (50.0, 20.0)
    said = AGE.predict(torch.tensor([[0.0], [1.5]], dtype=torch.bfloat16))
    assert said.dtype == torch.float32 and said.tolist() == [[50.0], [80.0]]


def test_the_loss_of_classes_by_hand():
    # −ln of the label's probability: 0.5, 0.2, 0.7, 0.3
    each = [-math.log(p) for p in (0.5, 0.2, 0.7, 0.3)]
    assert ONE.loss(LOGITS, CLASSES, reduction="none").tolist() == pytest.approx(each)
    assert float(ONE.loss(LOGITS, CLASSES)) == pytest.approx(sum(each) / 4)
    assert ONE.test_loss(LOGITS, CLASSES).tolist() == pytest.approx(each)
    assert ONE.attack_loss(LOGITS, CLASSES).tolist() == pytest.approx(each)
    # Smoothing by 0.3: 0.8 of the label's, 0.1 of each other class's.
    smooth = ONE.loss(LOGITS[:1], CLASSES[:1], label_smoothing=0.3)
    parts = (0.8, 0.5), (0.1, 0.2), (0.1, 0.3)
    assert float(smooth) == pytest.approx(-sum(w * math.log(p) for w, p in parts))
    # An image mixed of classes 0 and 2, three to one.
    mixed = LOGITS[:1], torch.tensor([[0.75, 0.0, 0.25]])
    for loss in (ONE.loss, ONE.attack_loss):
        assert float(loss(*mixed)) == pytest.approx(-0.75 * math.log(0.5) - 0.25 * math.log(0.3))


def test_the_losses_of_sets_and_of_numbers_by_hand():
    # σ(ln p) = p / (1 + p); −ln σ(ln p) = ln(1 + p) − ln p for a label, ln(1 + p) for none
    every = (1 + PROBS.double()).log().sum(dim=1) - (LABELS * PROBS.double().log()).sum(dim=1)
    assert SETS.loss(LOGITS, LABELS, reduction="none").tolist() == pytest.approx(every.tolist())
    assert float(SETS.loss(LOGITS, LABELS)) == pytest.approx(float(every.mean()))
    assert SETS.test_loss(LOGITS, LABELS).tolist() == pytest.approx(every.tolist())
    assert SETS.attack_loss(LOGITS, LABELS).tolist() == pytest.approx(every.tolist())
    each = [0.2, 0.0, 0.3, 0.5]  # errors 4, 0, 6, 10 in deviations of 20
    assert AGE.loss(SAID, AGES, reduction="none").tolist() == pytest.approx(each)
    assert float(AGE.loss(SAID, AGES)) == pytest.approx(0.25)
    assert AGE.test_loss(SAID, AGES).tolist() == [4.0, 0.0, 6.0, 10.0]


def test_scores_by_hand():
    assert ONE.scores(LOGITS, CLASSES).tolist() == [True, False, True, False]
    assert ONE.mean_score(LOGITS, CLASSES) == 0.5
    # {0, 2} has 0; {0, 1} lacks 2; {1} has 1; {0, 2} lacks 1
    assert SETS.scores(LOGITS, LABELS).tolist() == [True, False, True, False]
    assert SETS.mean_score(LOGITS, LABELS) == 0.5
    assert AGE.scores(SAID, AGES).tolist() == [4.0, 0.0, 6.0, 10.0]
    assert AGE.scores(SAID, AGES).dtype == torch.float64 and AGE.mean_score(SAID, AGES) == 5.0


def test_the_running_sum_of_a_batch():
    assert ONE.running(LOGITS, CLASSES) == 2
    mixed = torch.tensor([[0.6, 0.4, 0.0]] * 4)  # the larger share is class 0: the first image
    assert ONE.running(LOGITS, mixed) == 1 and SETS.running(LOGITS, LABELS) == 2
    assert AGE.running(SAID, AGES) == 20.0
    # Images 0 and 2 stand for all four: (4 + 6) / 2 · 4, and both are right.
    learned = torch.tensor([0, 2])
    assert AGE.running(SAID, AGES, learned) == 20.0
    assert AGE.running(SAID, AGES, torch.tensor([3])) == 40.0
    unknown = torch.tensor([[math.nan], [50.0]])
    assert AGE.running(unknown, AGES[:2]).isnan()
    with pytest.raises(UserError, match="image 0 has a non-finite prediction or label"):
        AGE.scores(unknown, AGES[:2])
    assert ONE.running(LOGITS, CLASSES, learned) == 4
    assert ONE.running(LOGITS, CLASSES, torch.tensor([0, 1])) == 2


def test_the_worst_of_two_and_a_guess_that_looks_at_no_image():
    right = torch.tensor([True, True, False, False])
    other = torch.tensor([True, False, True, False])
    for task in (ONE, SETS):
        assert task.worse_scores(right, other).tolist() == [True, False, False, False]
    assert AGE.worse_scores(*torch.tensor([[1.0, 5.0], [2.0, 3.0]])).tolist() == [2.0, 5.0]
    assert ONE.baseline_score(CLASSES) == pytest.approx(1 / 3)
    assert SETS.baseline_score(LABELS) == pytest.approx(7 / 12)  # seven labels of twelve
    # The median of 40, 50, 60 and 80 is 55: errors 15, 5, 5 and 25.
    assert AGE.baseline_score(AGES) == 12.5


def test_details_by_hand():
    found = ONE.details(LOGITS, CLASSES, CLASSES)
    assert found.test_correct == 2 and found.confusion == ((1, 0, 0), (0, 1, 1), (0, 1, 0))
    assert (found.false_discovery_rate, found.median_mae) == (None, None)
    found = SETS.details(LOGITS, LABELS, LABELS)
    assert (found.test_correct, found.false_discovery_rate, found.confusion) == (2, 0.5, None)
    found = AGE.details(SAID, AGES, torch.tensor([50.0, 50.0, 90.0]))
    assert found.median_mae == 12.5  # of answering 50 always: 10, 0, 10, 30
    assert found.test_correct is None


def test_a_mosaic_is_right_by_the_share_of_its_cells():
    logits, labels = MOSAICS
    assert MOSAIC.scores(logits, labels).tolist() == [0.5, 1.0]
    nats = [-(math.log(0.5) + math.log(0.2) + math.log(0.7) + math.log(0.3)) / 4]
    nats += [-(math.log(0.7) + math.log(0.5) + math.log(0.5) + math.log(0.6)) / 4]
    two = MOSAIC.loss(logits, labels, reduction="none"), MOSAIC.attack_loss(logits, labels)
    for losses in (*two, MOSAIC.test_loss(logits, labels)):
        assert losses.tolist() == pytest.approx(nats)
    assert MOSAIC.running(logits, labels, torch.tensor([1])) == 2
    assert MOSAIC.difference(torch.tensor([0.5, 1.0]), torch.tensor([0.25, 0.75])).value == 0.25
    rows, classes = MOSAIC.by_class(labels)
    assert rows.tolist() == [0] * 4 + [1] * 4 and torch.equal(classes, labels.flatten())
    assert MOSAIC.needs_classes("share") and MOSAIC.needs_classes("mix")


def test_images_and_counts_by_class():
    rows, classes = ONE.by_class(CLASSES)
    assert rows.tolist() == [0, 1, 2, 3] and classes.tolist() == [0, 1, 1, 2]
    rows, classes = SETS.by_class(LABELS)
    assert rows.tolist() == [0, 0, 1, 1, 2, 3, 3] and classes.tolist() == [0, 2, 0, 1, 1, 0, 2]
    assert AGE.by_class(AGES) is None
    assert ONE.counts(np.array([0, 2, 2, -1])) == [1, 0, 2]  # −1 is no class
    assert SETS.counts(LABELS.numpy()) == [3, 2, 2] and AGE.counts(AGES.numpy()) == []


@pytest.mark.parametrize(
    ("task", "labels", "said"),
    [
        (ONE, LABELS, r"have the shape \(4, 3\); allowed: \(images,\)"),
        (ONE, torch.tensor([0, 3]), "are 0 to 3; allowed: 0 to 2"),
        (ONE, torch.tensor([-1, 0]), "are -1 to 0"),
        (SETS, CLASSES, r"have the shape \(4,\); allowed: \(images, 3\)"),
        (SETS, LABELS[:, :2], r"have the shape \(4, 2\)"),
        (SETS, LABELS * 2, "are not sets of classes; allowed: 0 and 1, a 1 per image"),
        (SETS, LABELS * 0, "are not sets of classes"),
        (AGE, torch.tensor([50.0, math.inf]), "are not all numbers"),
    ],
)
def test_labels_of_another_task_are_refused(task, labels, said):
    with pytest.raises(UserError, match=f"^digits: labels of train {said}"):
        task.check(labels.numpy(), "digits: labels of train")


@pytest.mark.parametrize(
    ("task", "given", "wrong"),
    [
        *((ONE, (LOGITS, CLASSES), [0, 3]), (SETS, (LOGITS, LABELS), [[1, 2, 0]])),
        *((AGE, (SAID, AGES), [math.nan]), (NextToken(words=7), WORDS, [[7]])),
        (MOSAIC, MOSAICS, [[0, 1, 2]]),
    ],
)
def test_every_task(task, given, wrong):
    prediction, labels = given
    check_task(task, prediction, labels.numpy(), np.array(wrong))


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


def sides(seed, batch, captions=1, **form):
    images, texts = drawn(seed, batch, captions)
    return images_of(images, **form), texts_of(texts)


@given(st.integers(1, 6), st.integers(0, 99))
def test_the_loss_is_the_mean_of_both_cross_entropies(batch, seed):
    images, texts = sides(seed, batch)
    logits = (images[:, :-1] @ texts[:, 0, :3].T).tolist()
    total = 0.0
    for i in range(batch):
        row = math.log(sum(math.exp(logits[i][j]) for j in range(batch))) - logits[i][i]
        column = math.log(sum(math.exp(logits[j][i]) for j in range(batch))) - logits[i][i]
        total += (row + column) / 2 / batch
    assert float(TASK.loss(images, texts)) == pytest.approx(total, abs=1e-5)


@given(st.integers(1, 6), st.integers(0, 99))
def test_the_sigmoid_loss_is_the_sum_over_all_pairs(batch, seed):
    images, texts = sides(seed, batch, scale=2.0, bias=-3.0)
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
    found = text_to_image_recall(images, texts, (1, 2, 3))
    # y is 0 from images 0 and 2, which are level behind 1: places 2 and 3, half of the orders hit
    assert found[0].tolist() == [0.5, 0.75, 1.0]
    # z finds image 2 first; image 1 is level with 0 behind it
    assert found[1].tolist() == [0.0, 0.5, 1.0] and found[2].tolist() == [1.0, 1.0, 1.0]
    back = image_to_text_recall(images, texts, (1, 2, 5))
    assert back[0].tolist() == [1.0, 1.0, 1.0]
    assert back[2, 0] == 0.5  # its two captions z are level with the two of image 1
    # image 1: y of image 0 is above; its two z (0) are level with x and the two z of image 2
    assert back[1].tolist() == pytest.approx([0.0, 2 / 5, 1.0])


@given(st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))
def test_a_tie_counts_for_the_share_of_its_orders_that_hit(above, others, own, k):
    orders = list(permutations([False] * others + [True] * own))
    wanted = sum(any(([False] * above + list(order))[:k]) for order in orders) / len(orders)
    given = (torch.tensor([number]) for number in (above, others, own))
    assert float(image_text.tie_hit_probability(*given, (k,))) == pytest.approx(wanted)


def test_two_images_with_one_caption_share_the_hit_whichever_comes_first():
    images = images_of([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    texts = texts_of([[[1.0, 0, 0]], [[1, 0, 0]], [[0, 1, 0]]])
    assert TASK.scores(images, texts).tolist() == [0.5, 0.5, 1.0]
    assert TASK.scores(images.flip(0), texts.flip(0)).tolist() == [1.0, 0.5, 0.5]


@given(st.integers(2, 7), st.integers(1, 3), st.integers(0, 50))
def test_recall_is_that_of_sorting(images, captions, seed):
    left, texts = sides(seed, images, captions)
    said = left[:, :-1] @ texts[:, :, :3].flatten(0, 1).T
    for k in (1, 2):
        first = said.argsort(dim=0, descending=True)[:k]  # (k, captions)
        owner = torch.arange(images).repeat_interleave(captions)
        expected = (first == owner).any(dim=0).double().view(images, captions).mean(dim=1)
        torch.testing.assert_close(text_to_image_recall(left, texts, (k,))[:, 0], expected)
        best = said.argsort(dim=1, descending=True)[:, :k]
        expected = (owner[best] == torch.arange(images)[:, None]).any(dim=1).double()
        torch.testing.assert_close(image_to_text_recall(left, texts, (k,))[:, 0], expected)


def test_an_attack_compares_with_the_captions_of_all_and_not_of_the_batch():
    images, texts = sides(3, 5, captions=2)
    bound = TASK.with_gallery(texts)
    whole = bound.attack_loss(images, texts)
    parts = [bound.attack_loss(images[i : i + 1], texts[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(parts), whole)
    logits = images[:, :-1] @ texts.flatten(0, 1)[:, :3].T
    own = logits.view(5, 5, 2)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(whole, logits.logsumexp(1) - own.logsumexp(1))
    assert TASK.attack_loss(images[:1], texts[:1]) == pytest.approx(0.0, abs=1e-6)


def test_a_step_draws_one_caption_of_each_that_is_there():
    labels = torch.full((200, 2, 4), NO_CAPTION)
    labels[:, 0] = 3
    labels[:100, 1] = 4
    chosen = TASK.drawn(labels, BatchDraws(generator_for(0, 0), 200))
    assert chosen.shape == (200, 4) and (chosen[100:] == 3).all()
    assert 25 < int((chosen[:100, 0] == 4).sum()) < 75
    again = TASK.drawn(labels[50:60], BatchDraws(generator_for(0, 0), 200, torch.arange(50, 60)))
    assert torch.equal(again, chosen[50:60])
