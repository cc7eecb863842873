"""Swapped words and the confidence of next words: on a small text, against slow references.

The task of the next word, against log_softmax by hand.
"""

import math

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.data.sources.wikitext import Wikitext
from moecore.data.text.words import read_vocabulary
from moecore.measure import routing, word_confidence, word_swaps
from moecore.measure.base import Subject, at_once
from moecore.measure.calibration import Calibrate, Files, calibrate
from moecore.measure.calibrators.temperature import Temperature, slope
from moecore.measure.word_confidence import tokens_of
from moecore.measure.word_swaps import WordSwaps
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoE
from moecore.nn.predict import predictions
from moecore.nn.routers.top_k_softmax import TopKSoftmax
from moecore.report.column import opened
from moecore.tasks.class_scores import brier, confidence, correct
from moecore.tasks.next_token import NextToken
from tests.measure.subjects import built, digits, measured_twice

MOE = MoE(router=TopKSoftmax(k=2), experts=Mlp(number=4, hidden_ratio=1.0), blocks="all")
WORDS = ("tensor", "matrix", "vector", "value", "the", "of", "and", ",", "12", "returns")


def text(folder, lines=60):
    """Sixty lines of nine words, every split alike."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    for name in ("train", "valid", "test"):
        chosen = [" ".join(draws.choice(WORDS, 9)) for _ in range(lines)]
        (folder / f"{name}.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    out = folder / "prepared"
    Wikitext(root=str(folder), block=6, context=1).prepare(out)
    return Prepared.open(out)


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    data = text(tmp_path_factory.mktemp("text") / "words")
    backbone = LanguageModel(width=8, depth=2, heads=2, span=6)
    return Subject(built(backbone, MOE, data, 1.5), data)


def test_stop_words_and_punctuation_are_spared(subject):
    vocabulary = read_vocabulary(subject.data.folder, 12)
    tokens = subject.data.tokens("test")
    may = {vocabulary[number] for number in tokens[word_swaps.candidates(tokens, vocabulary)]}
    assert may == {"tensor", "matrix", "vector", "value", "12", "returns"}


def test_rows_are_those_of_a_text_with_unknown_words(subject):
    settings = WordSwaps(shares=(0.1, 0.4), seed=3)
    found = measured_twice(word_swaps.measure, subject, settings)
    data, model = subject.data, subject.model
    tokens = np.array(data.tokens("test"))
    vocabulary = read_vocabulary(data.folder, 12)
    places = np.random.default_rng(3).permutation(word_swaps.candidates(tokens, vocabulary))
    words = int((tokens != vocabulary.index("<eos>")).sum())
    assert words == 540 and [row.words for row in found.rows] == [54, 216]
    swapped = tokens.copy()
    swapped[places[:54]] = vocabulary.index("<unk>")
    padded = np.concatenate([np.full(6, -1), swapped])
    nats, moved = [], []
    for block in range(found.blocks):
        both = [padded[None, 6 * block : 6 * block + 12].reshape(1, 2, 6)]
        clean = np.concatenate([np.full(6, -1), tokens])[None, 6 * block : 6 * block + 12]
        both.append(clean.reshape(1, 2, 6))
        (said, routing), (_, before) = (predictions(model, one.astype(np.int32), 1) for one in both)
        right = torch.from_numpy(tokens[6 * block + 1 : 6 * block + 7]).long()
        nats.append(torch.nn.functional.cross_entropy(said[0].double(), right))
        layers = []
        for one, other in zip(routing, before, strict=True):
            inter = (one.chosen & other.chosen).sum(-1)
            union = (one.chosen | other.chosen).sum(-1)
            layers.append(1 - (inter / union).double().mean())
        moved.append(torch.stack(layers).mean())
    row = found.rows[0]
    assert row.nats.value == pytest.approx(float(torch.stack(nats).mean()), abs=1e-6)
    assert row.perplexity == pytest.approx(np.exp(row.nats.value))
    means = [layer.value for layer in row.selection_change]
    assert np.mean(means) > 0
    assert np.mean(means) == pytest.approx(float(torch.stack(moved).mean()), abs=1e-6)
    lost = opened(row.items["lost"])
    assert lost.mean() == pytest.approx(row.nats.value - found.nats.value, abs=1e-6)
    assert found.rows[1].agreement < row.agreement < 1


def test_tokens_are_worth_what_their_logits_are(subject, monkeypatch):
    monkeypatch.setattr(word_confidence, "NUMBERS", 12 * 17)  # seventeen tokens at a time
    known = tokens_of(subject.model, subject.data.test, 5)
    logits, _ = predictions(subject.model, subject.data.test.images, 5, routing=False)
    logits, labels = logits.flatten(0, 1), known.labels.flatten()
    found = known.answers(0.7)
    scaled = logits / 0.7
    expected = torch.nn.functional.cross_entropy(scaled.double(), labels, reduction="none")
    torch.testing.assert_close(found.nats.flatten(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.squares.flatten(), brier(scaled, labels), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sure.flatten(), confidence(scaled), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.hits.flatten(), correct(scaled, labels))
    for beta in (0.3, 2.0):
        expected = slope(logits.double(), labels, beta)
        assert known.slope(beta) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_temperature_of_a_text(subject, tmp_path):
    settings = Calibrate(calibrator=Temperature(), resamples=100)
    files = Files("pretrain/smoe/0", tmp_path, tmp_path, tmp_path)
    found = calibrate(subject, settings, files)
    data = subject.data
    logits, _ = predictions(subject.model, data.validation.images, 64, routing=False)
    labels = torch.from_numpy(np.array(data.validation.labels)).long()
    exact = Temperature().fit(logits.flatten(0, 1), labels.flatten())
    assert found.temperature == pytest.approx(exact.temperature, rel=1e-4)
    assert abs(found.temperature - 1) > 0.01
    assert found.test_images == len(data.test.labels)
    assert found.after.nll.value < found.before.nll.value
    assert found.before.score.value == pytest.approx(found.before.nll.value)
    assert found.after.ece.value < found.before.ece.value
    assert sum(found.after.bins.count) == data.test.labels.size
    assert (tmp_path / "calibrator.json").is_file()


def test_the_routing_of_a_text_is_measured(subject):
    """All that asks for no picture and no second view."""
    found = routing.measure(subject, routing.Routing(images=40, sweeps={"k": [1, 2]}), at_once)
    assert found.images == 40 and len(found.layers) == 2
    assert found.overlays.shape == (0, 2, 1, 6) and found.augmentations == ()
    assert 0 < found.entropy <= 1 and [row.k for row in found.sweeps.k] == [1, 2]


def test_pictures_have_no_words(subject, tmp_path):
    assert word_swaps.applies(subject) is None
    pictures = subject._replace(data=digits(tmp_path))
    assert word_swaps.applies(pictures) == "the data is no text, and words are swapped"


TASK = NextToken(words=5)


def made():
    torch.manual_seed(0)
    return torch.randn(3, 4, 5), torch.randint(5, (3, 4))


def test_loss_is_the_mean_of_nats():
    prediction, labels = made()
    each = -prediction.double().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert math.isclose(TASK.loss(prediction, labels), each.mean(), rel_tol=1e-6)
    torch.testing.assert_close(TASK.scores(prediction, labels), each.mean(dim=1))
    torch.testing.assert_close(TASK.token_loss(prediction, labels), each)
    blocks = TASK.loss(prediction, labels, reduction="none")
    torch.testing.assert_close(blocks.double(), each.mean(dim=1), rtol=1e-6, atol=1e-6)
    assert math.isclose(TASK.running(prediction, labels), 3 * each.mean(), rel_tol=1e-6)


def test_the_guess_is_the_entropy_of_the_words():
    labels = torch.tensor([[0, 0, 1, 2]])
    wanted = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert math.isclose(TASK.guess(labels), wanted)


def test_scores_are_kept_and_read_back():
    prediction, labels = made()
    scores = TASK.scores(prediction, labels)
    assert torch.equal(TASK.unpacked(TASK.packed(scores), 3), scores)
    interval = TASK.interval(scores)
    assert interval.low < interval.value < interval.high


def test_what_does_not_fit_is_refused():
    prediction, labels = made()
    with pytest.raises(ValueError, match=r"\(N, M, 5\) and \(N, M\) are needed"):
        TASK.loss(prediction[0], labels)
    with pytest.raises(UserError, match="labels run from 0 to 7; allowed: 0 to 4"):
        TASK.check(torch.tensor([[0, 7]]).numpy(), "labels")
    assert TASK.needs_classes("label_smoothing") is None
    assert TASK.needs_classes("shots") == "the labels are the words of a text"
