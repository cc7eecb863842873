import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from moecore import Prepared, UserError, predict_in_batches
from moecore.data.text.tokenizers import load_tokenizer
from moecore.data.text.words import read_vocabulary
from moecore.measure import WordSwaps, ZeroShot, few_shot, retrieval, routing, word_swaps
from moecore.measure.calibration import (
    Calibrate,
    CalibrationPaths,
    ClassCalibration,
    collect_head_inputs,
)
from moecore.measure.calibrators.temperature import Temperature, nll_derivative_by_row
from moecore.measure.explorer import Explorer, ExplorerData
from moecore.measure.few_shot import BIAS, EPSILON, EXPONENTS, FewShot
from moecore.measure.routing_metrics.expert_profiles import favourite_words
from moecore.measure.routing_metrics.expert_roles import read_layer_roles
from moecore.nn import predict
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.experts.mlp import Mlp
from moecore.parts import MeasuredModel, MoESettings
from moecore.routers import Told, TopKSoftmax
from moecore.sources import Digits, Wikitext
from moecore.statistics.intervals import wilson
from moecore.tasks import NextToken, next_token
from moecore.tasks.class_task import brier_scores, class_confidence, top1_hits
from moecore.testing import check_measurement
from tests.data.making import image_classes
from tests.measure.subjects import built, captioned, compute_without_cache, expert_roles
from tests.measure.test_truth import text_subject

MOE = MoESettings(router=TopKSoftmax(k=2), experts=Mlp(number=4, hidden_ratio=1.0), blocks="all")
WORDS = ("tensor", "matrix", "vector", "value", "the", "of", "and", ",", "12", "returns")
TASK = NextToken(words=5)
SETTINGS = FewShot(shots=(1, 3, 1000), draws=3)
DIGITS = {"kind": "digits", "test_limit": 40}
TEMPLATES = ("{}", "top left : {}", "a picture of {}")


def text(folder, lines=60):
    """Sixty lines of nine words, every split alike."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    for name in ("train", "valid", "test"):
        chosen = [" ".join(draws.choice(WORDS, 9)) for _ in range(lines)]
        (folder / f"{name}.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    out = folder / "prepared"
    Wikitext(root=str(folder), block=6, context=1).write(out)
    return Prepared.open(out)


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> MeasuredModel:
    data = text(tmp_path_factory.mktemp("text") / "words")
    backbone = LanguageModel(width=8, depth=2, heads=2, span=6)
    return MeasuredModel(built(backbone, MOE, data, 1.5), data)


def test_stop_words_and_punctuation_are_spared(subject):
    vocabulary, tokens = read_vocabulary(subject.data.folder, 12), subject.data.tokens("test")
    places = word_swaps.swappable_word_places(tokens, vocabulary)
    may = {vocabulary[number] for number in tokens[places]}
    assert may == {"tensor", "matrix", "vector", "value", "12", "returns"}
    ciphers = built(LanguageModel(width=8, depth=2, heads=2, span=6), MOE, subject.data, 1.5)
    ciphers.image = ciphers.image.model_copy(update={"truth": 2})
    assert WordSwaps.applies(subject) is None
    assert WordSwaps.applies(subject._replace(model=ciphers)) is not None


def test_stop_words_are_told_and_an_experts_words_by_hand(subject):
    # An untrained router sees which of the ten words a token is; three are stop words
    result = expert_roles(subject, windows=(2,))
    told = read_layer_roles(result)[1].labels["stop_word"]
    assert told.specialisation.labels == 2 and told.specialisation.share > 0.5
    assert result.find("information_stop_word").value > 0.01 and told.p < 0.01
    # Word 7 chose expert 0 twice of three times, 9 once of two; 4, once there, is rare
    words = np.array([[7, 9, 7], [9, 4, 7]])
    first, second = favourite_words(words, np.eye(2, dtype=bool)[[[0, 0, 1], [1, 0, 0]]], rare=2)
    assert first == [(7, 0.6667), (9, 0.5)] and second == [(9, 0.5), (7, 0.3333)]


def test_the_explorer_of_a_text(subject, tmp_path):
    found = ExplorerData.model_validate(check_measurement(Explorer(images=3), subject).facts)
    vocabulary = read_vocabulary(subject.data.folder, 12)
    last = subject.data.test.images[found.images[2]][-1]
    assert found.words[2] == tuple(vocabulary[number] for number in last)
    assert [one.kind for one in found.shown] == ["clean"] and found.kinds is None
    told = text_subject(Told())
    (tmp_path / "vocabulary.txt").write_text("\n".join(["<unk>", "<eos>", *"abcdefghi", ""]))
    data = told.data._replace(card={"task": told.model.image.task.model_dump()}, folder=tmp_path)
    experts = Explorer(images=3).explore(told._replace(data=data), compute_without_cache)
    kinds = [one.kinds for one in experts.layers[0].experts]
    assert kinds == [((kind, 1.0),) for kind in (1, 2, 3)]


def test_rows_are_those_of_a_text_with_unknown_words(subject):
    found = check_measurement(WordSwaps(shares=(0.1, 0.4)), subject)
    data, model = subject.data, subject.model
    tokens = np.array(data.tokens("test"))
    vocabulary = read_vocabulary(data.folder, 12)
    places = word_swaps.swappable_word_places(tokens, vocabulary)
    places = np.random.default_rng(0).permutation(places)
    assert int((tokens != vocabulary.index("<eos>")).sum()) == 540
    assert found.curve("swapped_words", "percent") == {10: 54, 40: 216}
    swapped = tokens.copy()
    swapped[places[:54]] = vocabulary.index("<unk>")
    padded = [np.concatenate([np.full(6, -1), one]).astype(np.int32) for one in (swapped, tokens)]
    nats, moved = [], []
    for block in range(len(data.test.labels)):
        both = (one[6 * block : 6 * block + 12].reshape(1, 2, 6) for one in padded)
        (said, routing), (_, before) = (predict_in_batches(model, one, 1) for one in both)
        right = torch.from_numpy(tokens[6 * block + 1 : 6 * block + 7]).long()
        nats.append(cross_entropy(said[0].double(), right))
        layers = []
        for one, other in zip(routing, before, strict=True):
            common, either = one.chosen & other.chosen, one.chosen | other.chosen
            layers.append(1 - (common.sum(-1) / either.sum(-1)).double().mean())
        moved.append(torch.stack(layers).mean())
    names = ("swapped_nats", "swapped_change", "swapped_lost")
    first, change, lost = (found.find(name, percent=10) for name in names)
    assert first.value == pytest.approx(float(torch.stack(nats).mean()), abs=1e-6)
    perplexities = found.curve("swapped_ppl", "swapped")
    assert perplexities[10] == pytest.approx(np.exp(first.value))
    expected = float(torch.stack(moved).mean())
    assert change.value == pytest.approx(expected, abs=1e-6) and expected > 0
    assert lost.value == pytest.approx(first.value - np.log(perplexities[0]), abs=1e-6)
    assert lost.item_values.mean() == pytest.approx(lost.value, abs=1e-6)
    few, many = found.curve("swapped_agreement", "percent").values()
    assert many < few < 1


def test_tokens_are_worth_what_their_logits_are(subject, monkeypatch):
    monkeypatch.setattr(predict, "logits_chunk_size", lambda *_: 17)
    known = collect_head_inputs(subject.model, subject.data.test, 5)
    logits, _ = predict_in_batches(subject.model, subject.data.test.images, 5, routing=False)
    logits, labels = logits.flatten(0, 1), known.labels.flatten()
    _, found = known.losses_and_confidences(1.0, 0.7)
    scaled = logits / 0.7
    nats = cross_entropy(scaled.double(), labels, reduction="none")
    briers = (found.squares, brier_scores(scaled, labels))
    sure = (found.confidence, class_confidence(scaled))
    for field, expected in ((found.nats, nats), briers, sure):
        torch.testing.assert_close(field.flatten(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.hits.flatten(), top1_hits(scaled, labels))
    for beta in (0.3, 2.0):
        expected = float(nll_derivative_by_row(logits.double(), labels, beta).mean())
        assert known.nll_slope(beta) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_temperature_of_a_text(subject, tmp_path):
    settings = Calibrate(calibrator=Temperature())
    files = CalibrationPaths("pretrain/smoe/0", tmp_path, tmp_path, tmp_path)
    calibration = ClassCalibration(settings=settings, files=files)
    found = calibration.collect_result(subject, compute_without_cache)
    data = subject.data
    logits, _ = predict_in_batches(subject.model, data.validation.images, 64, routing=False)
    labels = torch.from_numpy(np.array(data.validation.labels)).long()
    exact = Temperature().fit(logits.flatten(0, 1), labels.flatten())
    numbers = found.numbers()
    assert numbers["temperature"] == pytest.approx(exact.temperature, rel=1e-4)
    assert abs(numbers["temperature"] - 1) > 0.01
    assert found.facts["test_images"] == len(data.test.labels)
    assert numbers["nll_after"] < numbers["nll_before"]
    assert numbers["score_before"] == pytest.approx(numbers["nll_before"])
    assert numbers["ece_after"] < numbers["ece_before"]
    assert sum(found.facts["bins"]["after"]["count"]) == data.test.labels.size
    assert (tmp_path / "calibrator.json").is_file()


def test_the_routing_of_a_text_is_measured(subject):
    """All that asks for no picture and no second view."""
    settings = routing.Routing(images=40, sweeps={"k": [1, 2]})
    found = settings.collect_result(subject, compute_without_cache)
    assert len(found.find("entropy").item_values) == 40 and len(found.facts["load"]) == 2
    assert found.facts["overlays"]["shape"] == [0, 2, 1, 6]
    assert not [one for one in found.values if one.metric.startswith("match")]
    assert 0 < found.find("entropy").value <= 1 and list(found.curve("score_k", "k")) == [1, 2]


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_torchs_cross_entropy(dtype, smoothing, monkeypatch):
    monkeypatch.setattr(next_token, "CHUNK_SIZE", 15)  # three rows at a time, of twelve
    prediction, labels = made()
    prediction = (9 * prediction).to(dtype)
    ours, theirs = (prediction.clone().requires_grad_() for _ in range(2))
    found = TASK.loss(ours, labels, smoothing)
    logits = theirs.float().flatten(0, 1)
    wanted = cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(TASK.loss(prediction, labels, smoothing), wanted.detach())
    (3 * found).backward()
    (3 * wanted).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    far = torch.tensor([[[1e4, 0.0, 0.0, 0.0, -1e4]]], requires_grad=True)
    assert float(TASK.loss(far, torch.tensor([[4]])).detach()) == 2e4
    # the guess is the entropy of the words
    labels = torch.tensor([[0, 0, 1, 2]])
    wanted = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert math.isclose(TASK.baseline_score(labels), wanted)


def drawn_set(seed: int, images: int, width: int, classes: int = 3):
    """Standardised features with the bias column, (N, D), and targets ±1, (N, K)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(images, width, generator=generator, dtype=torch.float64)
    found = 0.5 * centres[labels] + noise
    found = (found - found.mean(0)) / (found.std(0, correction=0) + EPSILON)
    return few_shot.append_bias(found), few_shot.one_vs_rest_targets(labels, classes)


def refitted(x: torch.Tensor, y: torch.Tensor, penalty: float) -> torch.Tensor:
    """(XᵀX + λI)⁻¹XᵀY by its definition, (D, K)."""
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]).double(), x.T @ y)


@pytest.mark.parametrize("width", [5, 40])
def test_the_penalty_is_that_of_the_least_error_on_images_left_out(width):
    x, y = drawn_set(3, 18, width)
    errors = {}
    for exponent in EXPONENTS:
        guesses = []
        for place in range(18):
            keep = torch.arange(18) != place
            guesses.append(x[place] @ refitted(x[keep], y[keep], 2.0**exponent))
        errors[exponent] = float((torch.stack(guesses) - y).square().mean())
    assert few_shot.choose_exponent_by_loo(x, y) == min(errors, key=errors.__getitem__)
    flat, ones = torch.zeros(4, 2).double(), torch.ones(4, 2).double()
    assert few_shot.choose_exponent_by_loo(flat, ones) == EXPONENTS[-1], "the largest of equal ones"


@pytest.fixture(scope="module")
def results(run):
    return {name: check_measurement(SETTINGS, subject) for name, subject in run[1].items()}


def test_the_score_is_that_of_ridges_fitted_by_hand(run, results):
    """Features from the head's input, standardised by the few-shot set, V-MoE's bias column."""
    model, data = run[1]["vit"].model, run[1]["vit"].data
    arrays = [np.array(split.images) for split in (data.train, data.test)]
    pixels = [torch.from_numpy(array).float() / 255 for array in arrays]
    train, test = (model.encode(one)[0][:, 0].detach() for one in pixels)
    labels = torch.from_numpy(np.array(data.train.labels))
    value = results["vit"].find("few_shot", shots=3)
    hits = []
    for draw in range(3):
        generator = np.random.default_rng([0, draw])
        members = [np.flatnonzero(labels == one) for one in range(10)]
        chosen = np.concatenate([generator.permutation(rows)[:3] for rows in members])
        few = train[chosen].double()
        mean, scale = few.mean(0), few.std(0, correction=0) + 1e-5

        def ready(part, mean=mean, scale=scale):
            ones = torch.full((len(part), 1), BIAS, dtype=torch.float64)
            return torch.cat([(part.double() - mean) / scale, ones], dim=1)

        y = 2 * torch.nn.functional.one_hot(labels[chosen], 10).double() - 1
        weights = refitted(ready(few), y, 2.0 ** few_shot.choose_exponent_by_loo(ready(few), y))
        right = (ready(test) @ weights).argmax(1) == torch.from_numpy(np.array(data.test.labels))
        hits.append(right.double().numpy())
    assert value.value == pytest.approx(np.mean(hits)) and value.low < value.value < value.high
    # What claims are judged by: one number a test image, the mean over the draws.
    assert value.item_values == pytest.approx(np.mean(hits, axis=0), abs=1e-3)
    assert value.item_values.mean() == pytest.approx(value.value, abs=1e-5)


def test_numbers_above_the_smallest_class_are_skipped_with_the_reason(results):
    for found in results.values():
        assert list(found.curve("few_shot", "shots")) == [1, 3]
        (skipped,) = found.skipped
        assert skipped.startswith("1000 shots: the smallest class, ")
        assert skipped.endswith(" training images")
        assert min(found.curve("few_shot", "shots").values()) > 0.3, "chance is 0.1"
        for value in found.all("few_shot_leaky"):
            assert value.low <= value.value <= value.high


def test_draws_are_the_same_for_all_and_nested(run):
    subjects = run[1]
    sets = [few_shot.draw_few_shots(subject, 4, 2, 1) for subject in subjects.values()]
    assert np.array_equal(*sets)
    labels = subjects["vit"].data.train.labels
    assert (labels[sets[0]] == np.arange(10)[:, None]).all() and len(np.unique(sets[0])) == 40
    assert np.array_equal(few_shot.draw_few_shots(subjects["vit"], 2, 2, 1), sets[0][:, :2])
    assert not np.array_equal(few_shot.draw_few_shots(subjects["vit"], 4, 2, 0), sets[0])
    found = FewShot(shots=(2,), draws=1).collect_result(subjects["vit"], compute_without_cache)
    (value,) = found.all("few_shot")
    assert value.interval.limits is None and value.value > 0.1


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory):
    return captioned(tmp_path_factory.mktemp("mosaics"))


@torch.no_grad()
def test_the_chance_of_retrieval(mosaics):
    recall = retrieval.Retrieval(at=(1, 5, 30)).collect_result(mosaics, compute_without_cache)
    assert (recall.facts["images"], recall.facts["captions"]) == (30, 150)
    chances = recall.curve("text_to_image_chance", "k")
    assert list(chances.values()) == pytest.approx([1 / 30, 5 / 30, 1])
    any_own = [1 - math.comb(145, k) / math.comb(150, k) for k in (1, 5, 30)]
    chances = recall.curve("image_to_text_chance", "k")
    assert list(chances.values()) == pytest.approx(any_own)


def test_one_image_and_one_prompt_at_a_time(mosaics, tmp_path):
    settings = ZeroShot(source=DIGITS, templates=TEMPLATES)
    found = settings.collect_result(mosaics, compute_without_cache)
    model, task = mosaics.model, mosaics.data.task
    Digits(size=model.image.shape[0], test_limit=40).write(tmp_path)
    test = Prepared.open(tmp_path).test
    words = load_tokenizer(mosaics.data.folder, task)
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
    accuracy = found.find("zero_shot_accuracy")
    assert accuracy.interval == wilson(sum(right), 40)
    assert found.find("zero_shot_top5").value == pytest.approx(np.mean(among))
    assert accuracy.item_values == pytest.approx(np.array(right, float), abs=1e-4)
    assert [found.facts[name] for name in ("images", "templates", "chance")] == [40, 3, 0.1]
    rows = found.facts["classes"]
    assert [row["name"] for row in rows] == [str(digit) for digit in range(10)]
    assert sum(row["correct"] for row in rows) == sum(right)
    assert [row["images"] for row in rows] == np.bincount(test.labels, minlength=10).tolist()
    assert {row["unknown"] for row in rows} == {1}  # "picture"


def test_other_words_for_the_classes(mosaics, tmp_path):
    """A few classes have no five nearest."""
    names = tuple(str(number) for number in reversed(range(10)))
    plain = ZeroShot(source=DIGITS, templates=("{}",))
    turned = plain.model_copy(update={"names": names})
    before, after = (one.collect_result(mosaics, compute_without_cache) for one in (plain, turned))
    rows = zip(before.facts["classes"], after.facts["classes"], strict=True)
    assert all(one["images"] == other["images"] for one, other in rows)
    assert tuple(row["name"] for row in after.facts["classes"]) == names
    metric = "zero_shot_accuracy"
    assert before.find(metric).items != after.find(metric).items
    image_classes(tmp_path, {"0": 10, "1": 10}, size=(12, 12), mode="L")
    source = {"kind": "image_folder", "root": str(tmp_path), "size": 8, "channels": 1}
    found = ZeroShot(source=source).collect_result(mosaics, compute_without_cache)
    assert found.find("zero_shot_top5") is None and found.facts["chance"] == 0.5


def test_what_is_refused(mosaics, tmp_path):
    with pytest.raises(UserError, match="found 3 names; allowed: 10"):
        settings = ZeroShot(source=DIGITS, names=("one", "two", "three"))
        settings.collect_result(mosaics, compute_without_cache)
    image_classes(tmp_path, {"0": 10, "1": 10}, size=(12, 12))
    coloured = {"kind": "image_folder", "root": str(tmp_path), "size": 8}
    with pytest.raises(UserError, match="found images of 3 channels; allowed: 1"):
        ZeroShot(source=coloured).collect_result(mosaics, compute_without_cache)
    with pytest.raises(ValidationError, match="allowed: one {}"):
        ZeroShot(source=DIGITS, templates=("{} and {}",))
