from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from moecore import UserError, predict_in_batches
from moecore.measure.routing import Routing
from moecore.measure.routing_metrics import choice_patterns as patterns
from moecore.measure.routing_metrics import expert_roles as module
from moecore.measure.routing_metrics import expert_similarity as similarity
from moecore.measure.routing_metrics import label_information as information
from moecore.measure.routing_metrics.interventions import list_routers
from moecore.measure.routing_metrics.layer_metrics import dead_expert_share, max_load_violation
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.layers.moe import MoEFeedForward
from moecore.parts import MeasuredModel, TokenLayout, Values
from moecore.routers import Depth, ExpertChoice, Hash, NoisyTopK, Told
from moecore.testing import check_measurement
from tests.measure.subjects import compute_without_cache, expert_roles, routing_with_roles
from tests.measure.test_truth import subject, text_subject


def sets_of(*tokens: tuple[int, ...], experts: int) -> torch.Tensor:
    return torch.tensor([[[expert in token for expert in range(experts)] for token in tokens]])


def experts_by_count(*counts: tuple[int, ...]) -> torch.Tensor:
    rows = [np.repeat(range(len(one)), one) for one in counts]
    return torch.nn.functional.one_hot(torch.tensor(np.array(rows)), len(counts[0])).bool()


def test_coactivation():
    """Experts 0 and 1 are with each other always, 2 is with both, 3 was once with both."""
    counts = patterns.count_coactivation(sets_of((0, 1, 2), (0, 2, 1), (3, 0, 1), experts=4))[0]
    third = 1 / 3
    expected = [[0, 1, 2 * third, third], [1, 0, 2 * third, third], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert patterns.conditional_coactivation(counts).tolist() == pytest.approx(np.array(expected))
    # 2 was chosen by two of three tokens: of those of 0 as many, of those of 3 none
    assert patterns.coactivation_lift(counts, 3)[0, 2] == pytest.approx(1)
    assert patterns.coactivation_lift(counts, 3)[3, 2] == 0


def test_follow_ups():
    """Of the two tokens that chose 0 before, one goes to 1 and both to 2; nobody chose 2 before."""
    before = sets_of((0,), (0,), (1,), experts=3)
    after = patterns.layer_transitions(before, sets_of((1, 2), (2, 3), (2, 0), experts=4))
    assert after.tolist() == [[0, 0.5, 1, 0.5], [1, 0, 1, 0], [0, 0, 0, 0]]


def test_pair_lift_is_the_mean_over_the_pairs():
    scores = torch.from_numpy(np.random.default_rng(0).random((9, 5, 6)))
    scores[..., 4] = -1  # nobody's expert
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)
    lift = patterns.coactivation_lift(patterns.count_coactivation(chosen).sum(dim=0), 45)
    pairs = [lift[tuple(token.nonzero()[:, 0])] for token in chosen.flatten(0, 1)]
    values = patterns.mean_pair_lift_by_image(chosen)
    assert len(values) == 9 and float(values.mean()) == pytest.approx(float(np.mean(pairs)))
    with pytest.raises(UserError, match="k ≥ 2"):
        patterns.mean_pair_lift_by_image(sets_of((0,), (1,), experts=2))


def test_information_of_classes():
    """Four images, two of each class; over all 24 orders of the classes the share is exact."""
    chosen = experts_by_count((4, 0), (2, 2), (1, 3), (0, 4)).numpy()
    labels = np.array([0, 0, 1, 1])[:, None].repeat(4, 1)
    _, *others = [labels[list(order)] for order in permutations(range(4))]
    told, by_image = information.measure_information(chosen, labels, others)
    assert told.information == pytest.approx(0.215762, abs=1e-6)
    assert (23 * told.chance + told.information) / 24 == pytest.approx(0.099029, abs=1e-6)
    assert told.p == pytest.approx(1 / 3)
    assert told.normalised == pytest.approx((told.information - told.chance) / np.log(2))
    assert by_image["information"].mean() == pytest.approx(told.normalised)
    partly = np.concatenate([labels, [[-1] * 4]])
    five = np.concatenate([chosen, chosen[:1]])
    unknown, _ = information.measure_information(five, partly, [partly])
    assert unknown.information == pytest.approx(told.information)
    with pytest.raises(UserError, match="fewer than two labels"):
        information.measure_information(chosen, labels * 0, others)
    with pytest.raises(UserError, match="found 3 images .*; allowed: 4 and more"):
        orders = information.iterate_label_permutations(labels[:3], 200, 0)
        information.measure_information(chosen[:3], labels[:3], orders)


def test_specialisation_of_words():
    """Word 7 went to each of 0, 1, 2 twice of three times, 8 to 3 always; 9 came once."""
    pairs = (0, 1), (0, 2), (1, 2), (3, 1), (3, 0), (3, 2), (2, 0)
    chosen = sets_of(*pairs, experts=4).view(7, 1, 4).numpy()
    words = np.array([7, 7, 7, 8, 8, 8, 9])[:, None]
    # exchanged: 7 is at (0, 1), (0, 2), (3, 2), 8 at (1, 2), (3, 1), (3, 0): at most two of three
    swapped = np.array([7, 7, 8, 8, 8, 7, 9])[:, None]
    told, by_image = information.measure_information(chosen, words, [swapped], min_tokens=3)
    special = told.specialisation
    assert special.share == pytest.approx(0.833333, abs=1e-6) and special.labels == 2
    assert special.chance == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert by_image["specialisation"].mean() == pytest.approx(special.share - special.chance)
    told, by_image = information.measure_information(chosen, words, [swapped], min_tokens=4)
    assert told.specialisation is None and list(by_image) == ["information"]


def test_an_images_weight_in_specialisation():
    """What an image adds is the derivative by its weight: here it is there twice as often."""
    random = np.random.default_rng(0)
    chosen, labels = random.random((400, 3, 4)) < 0.4, random.integers(-1, 5, (400, 3))
    before, by_image = information.measure_information(chosen, labels, [labels])
    values = by_image["specialisation"]
    again = [np.concatenate([one, one[:1]]) for one in (chosen, labels)]
    told, _ = information.measure_information(*again, [again[1]])
    change = told.specialisation.share - before.specialisation.share
    assert 401 * change == pytest.approx(values[0] - values.mean(), rel=0.05)


def test_margin_and_load():
    scores = torch.tensor([[[0.5, 0.3, 0.15, 0.05], [0.4, 0.1, 0.35, 0.15]]])
    margins = patterns.choice_margin(scores, sets_of((0, 1), (0, 2), experts=4))
    assert margins.mean().item() == pytest.approx(0.175) and margins.min() == pytest.approx(0.15)
    assert patterns.choice_margin(scores, sets_of((), (0, 1, 2, 3), experts=4)).isnan().all()
    batches = experts_by_count((30, 20, 10, 0), (30, 10, 19, 1))
    counts = batches.flatten(0, 1).sum(dim=0)
    assert max_load_violation(counts) == 1 and patterns.mean_batch_maxvio(batches, 1) == 1
    assert dead_expert_share(counts, 0.1) == 0.25
    assert patterns.cumulative_load_shares(counts)[1] == 0.75
    assert patterns.cumulative_load_shares(counts)[-1] == 1
    assert patterns.chance_maxvio(10**6, 4) < 0.01 < patterns.chance_maxvio(100, 4) < 0.5


def test_predictability():
    """Two best of four each: counts 3 2 2 1 and 3 1 3 1; of eight choices six are foretold."""
    predicted = sets_of((0, 2), (1, 3), (0, 1), (2, 0), experts=4)
    actual = sets_of((0, 2), (1, 2), (0, 3), (2, 0), experts=4)
    by_image, chances, of_layer = patterns.choice_predictability(predicted, actual)
    assert by_image["early_load"] == pytest.approx(0.948683, abs=1e-6)
    assert by_image["early_choice"] == 0.75 and chances["early_choice"] == 0.5
    assert of_layer["early_load_rank"] == pytest.approx(0.707107, abs=1e-6)
    assert of_layer["early_hottest"] == 1
    assert chances["early_load"] == pytest.approx(2 / 5**0.5)  # (2 2 2 2) · (3 1 3 1)
    images = [side.view(4, 1, 4) for side in (predicted, actual)]
    by_image, _, _ = patterns.choice_predictability(*images)
    assert by_image["early_load"].mean() == pytest.approx(0.948683, 1e-6)
    _, _, of_layer = patterns.choice_predictability(predicted[:, :2], actual[:, :2])
    assert "early_load_rank" not in of_layer


def test_similarity_by_chance_is_of_other_people():
    # Of people who have two images each, of 1, 2, 3, 4 and, in another order, 3, 1, 2, 4. CKA of
    # one number is r²: of these (2 / 5)². By images 2, 3, 2, 4, 3, 1, 1, 4: r = -1 / 10.
    first = torch.arange(1, 5).double().repeat_interleave(2).view(8, 1, 1).expand(8, 2, 1)
    groups, pair = (np.arange(8) // 2, np.arange(8), None), [first, 5 * first + 1]
    found = [similarity.compare_experts(pair, people) for people in groups]
    chances = [one.chances["expert_cka"] for one in found]
    assert chances == pytest.approx([0.16, 0.01, 0.01])


@pytest.mark.parametrize("made", [subject, text_subject])
def test_early_choices_are_the_routers_of_the_tokens_before(made):
    """The second layer has none where its router reads the truth; the first has none before it."""
    measured = made(NoisyTopK(k=2))
    images = measured.data.test.images
    (first, second) = [one for one in measured.model.modules() if isinstance(one, MoEFeedForward)]
    tokens = []
    first.register_forward_hook(lambda *given: tokens.append(given[1][0]))
    with patterns.record_choices_from_earlier_layer(measured.model) as early:
        predict_in_batches(measured.model, images, prediction=False)
    none, parts = early.values()
    assert none == []
    with torch.no_grad():
        choices = similarity.cat_last_calls(parts, len(images))
        assert torch.equal(choices, second.router(tokens[-1])[1].chosen)
    told = made(Told())
    with patterns.record_choices_from_earlier_layer(told.model) as early:
        predict_in_batches(told.model, told.data.test.images, prediction=False)
    assert list(early.values()) == [[], []]


def test_local_consistency():
    """Windows (0, 0), (0, 1), (1, 2): of the six uses at θ = 1 all are served by five sets."""
    uses = patterns.count_windows_by_expert_uses(sets_of((0,), (0,), (1,), (2,), experts=3), 2)
    assert patterns.compute_consistency_f1_by_threshold(uses[0].numpy()).tolist() == (
        [0.5, 0.75, 0.5]
    )
    assert patterns.consistency_by_image(uses.numpy()).tolist() == pytest.approx([0.75])
    with pytest.raises(UserError, match="a window of 5"):
        patterns.count_windows_by_expert_uses(sets_of((0,), (1,), experts=2), 5)


@pytest.mark.parametrize("made", [subject, text_subject])
def test_experts_that_are_told_the_truth_tell_it(made):
    found = check_measurement(routing_with_roles(windows=(2, 9)), made(Told()))
    assert found.find("information_truth").value == pytest.approx(1, abs=0.05)
    assert found.find("information_layer_before").value == pytest.approx(1, abs=0.05)
    layers = module.read_layer_roles(found)
    for layer in layers:
        assert layer.labels["truth"].p == pytest.approx(1 / 201)
        assert layer.labels["position"].p > 0.01 and "pair_lift" not in layer.values
        assert "consistency_9" not in layer.values
        chance = layer.chances["consistency_2"]
        assert layer.values["consistency_2"] == pytest.approx(chance, abs=0.06)
    assert ("class" in layers[0].labels) == (made is subject)
    assert ("word" in layers[0].labels) == (made is text_subject)
    # Of 20 images, the tokens that Mixture-of-Depths processes last are of one class's.
    if made is subject:
        first, second = module.read_layer_roles(expert_roles(subject(Depth()), images=20))
        assert "class" in first.labels and "class" not in second.labels


def test_all_of_it_is_of_one_pass():
    """Every layer sees each image once, whatever the roles are told from."""
    measured = subject(NoisyTopK(k=2))
    seen = []
    for layer in [one for one in measured.model.modules() if isinstance(one, MoEFeedForward)]:
        layer.register_forward_hook(lambda layer, given, out: seen.append(len(given[0])))
    settings = routing_with_roles(windows=(2,))
    images = len(measured.data.test.images)
    out = Values(module.ExpertRoles.metrics, measured.data.task, compute_without_cache)
    records = settings.record_routing_and_put_roles(measured, np.arange(images), out)
    assert len(records) == 2 and settings.images > out.facts["roles"]["images"] == images
    named = {one.metric for one in out.values}
    assert {"pair_lift", "expert_cka", "early_choice", "information_truth"} <= named
    assert sum(seen) == 2 * images
    first, second = (record.chosen for record in records)
    after = patterns.layer_transitions(first, second)
    before = patterns.layer_transitions(second, first)
    second_layer = out.facts["roles"]["layers"][1]
    assert np.array(second_layer.after) == pytest.approx(after.numpy())
    assert np.array(second_layer.before) == pytest.approx(before.numpy())


@pytest.mark.parametrize("made", [subject, text_subject])
def test_roles_do_not_depend_on_the_batch(made, monkeypatch):
    """Of the few tokens that experts are compared on, too: 80 of 40 images of 4 or 5."""
    monkeypatch.setattr(similarity, "MIN_TOKENS_PER_DIMENSION", 5)
    measured = made(NoisyTopK(k=2))
    settings = routing_with_roles(windows=(2,))
    collector = (module.ExpertRoles.metrics, measured.data.task, compute_without_cache)
    whole, parts = Values(*collector), Values(*collector)
    for batch, out in ((40, whole), (7, parts)):
        settings.model_copy(update={"batch": batch}).record_routing_and_put_roles(
            measured, np.arange(40), out
        )
    for one, other in zip(whole.values, parts.values, strict=True):
        assert (one.metric, one.at) == (other.metric, other.at)
        assert other.value == pytest.approx(one.value, abs=1e-5), one.metric


def test_experts_by_position_tell_the_position():
    """Four patches' experts of three are 2, 1, 1 or 2, 2, 0: H = 1.04 or ln 2, over ln 4."""
    result = expert_roles(subject(Hash(by="position")))
    assert result.find("information_position").value >= 0.49
    assert result.find("information_truth").value == pytest.approx(0, abs=0.01)
    assert module.read_encoded_choices(result)[0].shape == (40, 5, 3)


def test_margins_are_of_what_the_choice_is_by():
    """A large bias lets all choose the experts 1 and 2, and a group hides a better expert."""
    measured = subject(NoisyTopK(k=2, score="sigmoid", balance=LossFree()))
    for router in list_routers(measured.model):
        router.balance.bias.copy_(torch.tensor([0.0, 2.0, 4.0]))
    _, records = predict_in_batches(measured.model, measured.data.test.images, prediction=False)
    for layer, record in zip(module.read_layer_roles(expert_roles(measured)), records, strict=True):
        scores = record.logits.sigmoid()
        margin = (scores[..., 1] + 2 - scores[..., 0]).mean().item()
        assert margin > 1 and layer.values["margin"] == pytest.approx(margin, rel=1e-6)
    router = NoisyTopK(k=2, groups={"number": 2, "kept": 1}).build(4, experts=6).eval()
    _, decided = router.decide(torch.tensor([[[2.5, 0, 0, 2, 2, 1]]]))
    scores = router.selection_scores(decided)
    margin = patterns.choice_margin(decided.probs, decided.chosen)
    assert margin < 0 < patterns.choice_margin(scores, decided.chosen)


def test_where_it_does_not_apply():
    assert module.ExpertRoles.model_refusal(subject(NoisyTopK()).model) is None
    slots = subject(ExpertChoice())
    skipped = expert_roles(slots).facts["roles"]["skipped"]
    assert skipped == module.ExpertRoles.model_refusal(slots.model) != ""
    assert Routing(images=3).roles is None
    with pytest.raises(ValidationError, match="found 3, and roles exchange images; allowed: 4"):
        Routing(images=3, roles={})


def slow_similarity(outputs: torch.Tensor) -> float:
    """Return CKA of two experts (2, n, d) as HSIC(K, L) / √(HSIC(K, K) HSIC(L, L))."""
    n = outputs.shape[1]
    centre = np.eye(n) - 1 / n
    kernels = [centre @ one.numpy() @ one.numpy().T @ centre for one in outputs]
    hsic = [[np.trace(one @ other) for other in kernels] for one in kernels]
    return hsic[0][1] / np.sqrt(hsic[0][0] * hsic[1][1])


def test_expert_similarity(monkeypatch):
    """The fixture is of 4 tokens; without 10 for each number nothing is said."""
    first = torch.tensor([[1.0, 0], [0, 1], [2, 1], [-1, 1]]).double()
    second = torch.tensor([[2.0, 1], [1, 1], [3, 0], [0, 2]]).double()
    pair = [one.view(2, 2, 2) for one in (first, second, torch.full((4, 2), 0.1).double())]
    assert similarity.compare_experts(pair) is None
    monkeypatch.setattr(similarity, "MIN_TOKENS_PER_DIMENSION", 1)
    alike = similarity.compare_experts(pair)
    expected = [[1, 0.978596, np.nan], [0.978596, 1, np.nan], [np.nan] * 3]
    assert alike.cka.numpy() == pytest.approx(np.array(expected), abs=1e-6, nan_ok=True)
    assert alike.cosine[0, 1] == pytest.approx(0.800767, abs=1e-6)
    assert alike.by_image["expert_cka"].mean() == pytest.approx(0.978596, abs=1e-6)
    assert similarity.compare_experts(pair[1:]) is None


def test_similarity_of_images_by_the_slow_formula():
    """What an image does to CKA is its derivative by the image's weight; turned outputs are 1."""
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 20, 4, 5, generator=random, dtype=torch.float64)
    outputs[2] = 3 * outputs[0] @ torch.linalg.qr(outputs[1, :2].view(-1, 5)[:5]).Q + 7
    alike = similarity.compare_experts(outputs.unbind())
    assert alike.cka[0, 1] == pytest.approx(slow_similarity(outputs[:2].flatten(1, 2)))
    assert alike.cka[0, 2] == pytest.approx(1) and alike.chances["expert_cka"] < 0.1
    first, second = outputs[:2]
    again = [torch.cat([one[:1], *[one] * 499]) for one in (first, second)]
    step = similarity.compare_experts(again).cka[0, 1] - alike.cka[0, 1]
    values = similarity.compare_experts([first, second]).by_image["expert_cka"]
    assert step * len(again[0]) == pytest.approx(values[0] - values.mean(), rel=0.01)


@pytest.mark.parametrize("made", [subject, text_subject])
def test_kept_tokens_are_those_of_the_images_own_pass(made):
    """An expert's outputs, weighted, are the layer's, where one expert is chosen with weight 1."""
    measured = made(NoisyTopK(k=1, renormalise=True))
    images = measured.data.test.images
    (layer, *_) = [one for one in measured.model.modules() if isinstance(one, MoEFeedForward)]
    outputs = []
    layer.register_forward_hook(lambda *given: outputs.append(given[2]))
    counted = similarity.BatchTracker(images)
    with similarity.store_layer_tokens(measured.model, counted) as kept:
        predict_in_batches(measured.model, counted, prediction=False)
    tokens, (record,) = outputs[-1]
    said = torch.stack(next(iter(kept.values())).outputs(len(images)), dim=2)
    rows, number = torch.arange(len(images)).unsqueeze(-1), said.shape[1]
    where = (rows + torch.arange(number) * (tokens.shape[1] // number)) % tokens.shape[1]
    own = said[record.chosen[rows, where]].view(len(images), number, -1)
    torch.testing.assert_close(own.float(), tokens[rows, where])


@pytest.mark.filterwarnings("error")
def test_labels_of_words_and_cubes(tmp_path):
    """Words 0 to 4 come 10, 8, 6, 4 and 12 times: rare ones are no words, but stop words are."""
    (tmp_path / "vocabulary.txt").write_text("tensor\nThe\nof\n,\n<eos>\n<unk>\n")
    words = np.repeat(range(5), (10, 8, 6, 4, 12)).reshape(10, 1, 4)
    task = SimpleNamespace(outputs=6)
    image = SimpleNamespace(truth=None, task=task)
    data = SimpleNamespace(card={}, folder=tmp_path)
    subject = MeasuredModel(SimpleNamespace(image=image), data)
    layout = TokenLayout(0, (4,), (4,))
    labels = information.token_labels_by_name(subject, np.arange(10), words, layout)
    assert labels["word"].unique().tolist() == [-1, 0, 4]
    kinds = dict(zip(words.ravel().tolist(), labels["stop_word"].ravel().tolist(), strict=True))
    assert kinds == {0: 0, 1: 1, 2: 1, 3: -1, 4: -1}
    maps = np.zeros((3, 2, 2, 1, 1), np.uint8)  # of the second volume's two voxels
    maps[1, :, 0, 0, 0] = 3, 7
    tissues = information.tissue_labels(maps, [1, 2], TokenLayout(1, (2, 1, 1), (2, 1, 1)))
    assert tissues.tolist() == [[-1, 1, -1], [-1, -1, -1]]
