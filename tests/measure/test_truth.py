import gc
import math

import numpy as np
import pytest
import torch
from torch import nn

from moecore.backbones import LanguageModel, Vit
from moecore.core.files import UserError, to_jsonable
from moecore.data.corruptions import NOISE_SIGMAS, add_noise, standard_normal_noise
from moecore.data.prepared import Prepared, Split
from moecore.measure import Cost, cost, truth
from moecore.measure import pixel_baselines as baselines
from moecore.measure.base import SkipReason, read_result
from moecore.measure.routing_metrics.epoch_routing import (
    EpochRecorder,
    expert_kind_counts,
    expert_purity,
    purity_by_epoch,
    purity_by_image,
)
from moecore.measure.truth import Truth, measure_truth
from moecore.measure.values import Found
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoEFeedForward
from moecore.parts import Classification, ImageSpec, MeasuredModel, MoESettings, SparsePlan
from moecore.routers import NoisyTopK, Told
from moecore.stages import baselines as stage
from moecore.tasks import Regression
from moecore.training.meter import LiveBytesCounter
from moecore.training.outcome import RoutingOverTraining
from tests.measure.subjects import built, compute_without_cache, in_run, top_k_mlps
from tests.nn.backbones.test_language_model import WORDS, text

TWO = Classification(classes=("a", "b"))
IMAGE = ImageSpec(channels=1, size=8, mean=(0.5,), std=(0.3,), task=TWO, truth=3)
EXPERTS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2]])
KINDS = torch.tensor([[1, 1], [2, 2], [2, 0], [3, 1]])
THREE = Mlp(number=3)
CLASSES = Classification(classes=("a", "b"))
AGES = Regression(target="age", unit="years", mean=60.0, deviation=10.0)
SETTINGS = baselines.Baselines(penalties=(0.01, 1e6))
TRAIN = {0: 0, 10: 0, 20: 0, 30: 0, 200: 1, 210: 1}  # pixel → class
TOP2 = {"kind": "noisy_top_k", "k": 2}
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 1}
FIVE = Classification(classes=tuple("abcde"))
TIMED = ImageSpec(channels=1, size=8, task=FIVE, mean=(0.5,), std=(0.2,))


def subject(router, seed: int = 0, image: ImageSpec = IMAGE, experts: Mlp = THREE) -> MeasuredModel:
    """A fresh model, and 40 images of noise with four patches of drawn kinds."""
    task = image.task
    torch.manual_seed(seed)
    moe = MoESettings(router=router, experts=experts, blocks="all")
    pooling = "mean" if task.cells > 1 else "class"
    model = Vit(patch=4, width=16, depth=2, heads=2, pooling=pooling).build(image, moe).eval()
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    kinds = random.integers(1, 4, (40, 1, 2, 2), dtype=np.uint8).repeat(4, 2).repeat(4, 3)
    labels = np.arange(40 * task.cells) % task.outputs
    labels = labels.reshape(task.storage_format(40)[0])
    split = Split(np.concatenate([pixels, kinds], axis=1), labels)
    card = {"name": "noise", "task": task.model_dump()}
    return MeasuredModel(model, Prepared(card, split, split, split))


def text_subject(router) -> MeasuredModel:
    """A fresh language model, and 40 blocks of drawn words and kinds, each read with one before."""
    torch.manual_seed(0)
    spec = text(4, 1).model_copy(update={"truth": 3})
    moe = MoESettings(router=router, experts=Mlp(number=3), blocks="all")
    model = LanguageModel(width=8, depth=2, heads=2, span=4).build(spec, moe).eval()
    random = np.random.default_rng(0)
    words, kinds = random.integers(WORDS, size=(40, 2, 4)), random.integers(1, 4, (40, 2, 4))
    split = Split(np.concatenate([words, kinds], axis=1).astype(np.int32), words[:, 1])
    card = {"name": "words", "task": spec.task.model_dump()}
    return MeasuredModel(model, Prepared(card, split, split, split))


def test_by_hand():
    from sklearn.metrics import adjusted_mutual_info_score, mutual_info_score

    # Expert 0 saw kind 1 twice and 2 once, expert 1 kind 2 twice (an unknown token is left out). Of
    # seven tokens 2, 2 and 1 are of their expert's most frequent kind. In a second table both
    # experts saw the first kind most: 3 + 3 of 10; by kind it would be 3 + 2.
    assert expert_purity(np.array([[3, 2], [3, 2]])) == 0.6
    layer = measure_truth(EXPERTS, KINDS, 3, 3)
    assert layer.counts == ((2, 1, 0), (0, 2, 0), (1, 0, 1))
    by_image = purity_by_image(expert_kind_counts(EXPERTS.numpy(), KINDS.numpy(), 3, 3))
    assert by_image.mean() == pytest.approx(5 / 7)
    assert layer.values["purity"].value == pytest.approx(5 / 7)
    assert layer.values["matched_to_truth"].value == pytest.approx(5 / 7)
    known = KINDS.numpy() > 0
    pair = KINDS.numpy()[known], EXPERTS.numpy()[known]
    assert layer.values["mutual_information"].value == pytest.approx(mutual_info_score(*pair))
    adjusted = layer.values["adjusted_mutual_information"].value
    assert adjusted == pytest.approx(adjusted_mutual_info_score(*pair))
    with pytest.raises(UserError, match="found 1 images .*; allowed: 4 and more"):
        measure_truth(EXPERTS[:1], KINDS[:1], 3, 3)
    # experts are listed by their match
    experts, kinds = 2 - torch.tensor([[0, 1, 2, 2]]), torch.tensor([[1, 2, 3, 3]])
    layer = measure_truth(experts.repeat(5, 1), kinds.repeat(5, 1), 4, 3)
    assert layer.counts == ((5, 0, 0), (0, 5, 0), (0, 0, 10), (0, 0, 0))
    assert layer.values["matched_to_truth"].value == 1


def test_purity_by_epoch():
    """Kinds 1 1 2 2 0. First by chance (layers: 2 + 0 and 1 + 1 of 4), then one layer is pure."""
    kinds = np.array([[1, 1, 2, 2, 0]])
    first = [[[0, 0, 0, 0, 1], [0, 1, 0, 1, 0]], [[1, 1, 0, 0, 0], [0, 1, 0, 1, 1]]]
    epochs = [np.array([epoch], np.int16) for epoch in first]
    assert purity_by_epoch(epochs, kinds, 2, 2) == [0.5, 0.75]
    assert purity_by_epoch([np.array([[[-1, 0, 1, 1, 1]]], np.int16)], kinds, 2, 2) == [1.0]
    (nothing,) = purity_by_epoch([np.full((1, 1, 5), -1, np.int16)], kinds, 2, 2)
    assert math.isnan(nothing), "a router may let no token through"
    settling = to_jsonable(RoutingOverTraining(purity=(0.5, nothing)))
    assert RoutingOverTraining.model_validate(settling).purity == (0.5, None)


def test_a_training_keeps_the_purity_of_its_epochs(tmp_path):
    """Of the same images, untrained: what the measurement finds."""
    measured = subject(NoisyTopK(k=1))
    watch = EpochRecorder(tmp_path, measured.model, measured.data, (), epochs=2, seed=0)
    watch.record(1)
    watch.record(2)
    purity = Truth().collect_result(measured, compute_without_cache).find("purity").value
    settling = watch.collect_routing()
    assert settling.purity == pytest.approx([purity] * 2) and settling.saturation == (1, 1)


@pytest.mark.parametrize("made", [subject, text_subject])
def test_told_reaches_a_purity_of_one_and_a_shuffled_truth_chance(made):
    result = Truth().collect_result(made(Told()), compute_without_cache)
    for name in ("purity", "adjusted_mutual_information", "matched_to_truth"):
        assert list(result.curve(name, "layer").values()) == pytest.approx([1, 1])
    assert result.find("mutual_information_p", layer=1).value == pytest.approx(1 / 201)
    assert max(result.curve("purity_chance", "layer").values()) < 0.6
    noise, attack = (result.curve("changed_purity", kind) for kind in ("noise", "attack"))
    is_image = made is subject  # words have no pixels
    assert list(noise) == ([0, *NOISE_SIGMAS] if is_image else [])
    assert list(attack) == ([0, 2, 4, 8] if is_image else [])
    assert set(noise.values()) <= {1}, "what is seen changes, the truth not"
    drawn = torch.from_numpy(np.random.default_rng(2).permutation(40))
    kinds = torch.from_numpy(np.random.default_rng(3).integers(1, 4, (40, 4)))
    shuffled = measure_truth(kinds - 1, kinds[drawn], 3, 3).values
    assert shuffled["purity"].value == pytest.approx(shuffled["purity_chance"].value, abs=0.06)
    assert shuffled["mutual_information_p"].value > 0.05


def test_the_null_covers(monkeypatch):
    """Of unrelated experts and kinds p is uniform: at most a few of 60 are below 0.05."""
    monkeypatch.setattr(truth, "RESAMPLES", 2)
    pairs = torch.from_numpy(np.random.default_rng(4).integers(3, size=(60, 2, 20, 4)))
    layers = [measure_truth(experts, kinds + 1, 3, 3) for experts, kinds in pairs]
    found = [layer.values["mutual_information_p"].value for layer in layers]
    assert np.mean(np.array(found) < 0.05) < 0.15 and np.mean(found) == pytest.approx(0.5, abs=0.12)


def test_purity_of_changed_images():
    """Clean it is the layers' mean, which noise and attack change; by hand for one noise."""
    measured = subject(NoisyTopK(k=1))
    result = Truth().collect_result(measured, compute_without_cache)
    clean = result.find("changed_purity", noise=0.0)
    assert clean.value == pytest.approx(result.find("purity").value)
    assert clean.low <= clean.value <= clean.high
    changed = result.curve("changed_purity", "noise")
    images = measured.data.test.images
    directions = standard_normal_noise(np.arange(40), (2, 8, 8), 0)
    pixels = add_noise(images, directions, 0.2)
    pixels[:, 1] = torch.from_numpy(images[:, 1]) / 255
    kinds = images[:, 1, ::4, ::4].reshape(40, 4)
    purities = []
    for record in measured.model(pixels).routing:
        chosen = record.probs.argmax(-1)[:, 1:].numpy()
        counts = [[(kinds[chosen == one] == kind).sum() for kind in (1, 2, 3)] for one in range(3)]
        purities.append(sum(map(max, counts)) / 160)
    assert changed[0.2] == pytest.approx(np.mean(purities)) and len(set(changed.values())) > 1


def test_it_is_measured_of_routers_on_data_whose_truth_is_known():
    assert Truth.applies(subject(NoisyTopK(k=1))) is None
    dense = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE)
    assert "no routers" in Truth.applies(subject(Told())._replace(model=dense))
    unknown = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE.model_copy(update={"truth": 0}))
    assert "no truth of tokens" in Truth.applies(subject(Told())._replace(model=unknown))


def split(points: dict[int, int], axes: int = 4) -> Split:
    pixels = np.array([*points], np.uint8)
    return Split(pixels.reshape(-1, *[1] * (axes - 1)), np.array([*points.values()]))


def measure(validation, test, shots=None, axes=4, task=CLASSES, seed=0):
    splits = [split(points, axes) for points in (TRAIN, validation, test)]
    data = Prepared({"task": task.model_dump(mode="json"), "channels": 1}, *splits)
    return baselines.measure_baselines(data, SETTINGS, shots, seed, compute_without_cache)


def test_scores_by_hand_and_validation_alone_chooses():
    """Five of six neighbours are of class 0 three times or more; 10⁶ leaves the intercept alone."""
    found = measure({5: 0, 250: 1}, {1: 0, 254: 1})
    values = {value.at["classifier"]: value for value in found.all("baseline")}
    assert values[baselines.LOGISTIC].item_values.tolist() == [1, 1]
    assert values["5 nearest neighbours"].item_values.tolist() == [1, 0]
    assert found.facts == {"penalty": 0.01, "images": 6}
    assert measure({5: 0, 250: 1}, {1: 0, 254: 0}).facts["penalty"] == 0.01
    assert measure({5: 0, 250: 0}, {1: 0, 254: 1}).facts["penalty"] == 1e6
    assert measure({5: 0, 6: 0}, {1: 0, 254: 1}).facts["penalty"] == 1e6  # the larger of two equals
    assert measure({5: 0, 250: 1}, {1: 0, 254: 1}, shots=2).facts["images"] == 4


def test_the_seed_draws_the_images_of_each_class():
    """Images between one of class 0, from 0 to 30, and one of class 1, 200 or 210."""
    between = dict.fromkeys(range(98, 122), 0)
    drawn = [measure({5: 0, 250: 1}, between, shots=1, seed=seed) for seed in range(6)]
    assert len({found.all("baseline")[0].item_values.tobytes() for found in drawn}) > 1


def test_the_small_network_learns_and_its_seed_draws_it():
    """Rows or columns of 8 × 8 pixels, at random places; a linear map would need every place."""
    random = np.random.default_rng(0)
    images = np.zeros((1020, 1, 8, 8), np.uint8)
    labels = np.arange(1020) % 2
    for image, label in zip(images[:, 0], labels, strict=True):
        (image if label else image.T)[random.integers(8)] = random.integers(100, 256)
    train = baselines.read_pixel_values(Split(images, labels), np.arange(1000), 1, 64)
    test = images[1000:].reshape(20, 64).astype(np.float32) / 255
    before = torch.get_rng_state()
    first, again, other = (baselines.SmallCnn(train, 2, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (first.predict(test) == labels[1000:]).mean() > 0.8
    parameters = [network.network[0].weight for network in (first, again, other)]
    assert torch.equal(*parameters[:2]) and not torch.equal(*parameters[1:])


def test_large_images_are_averaged_without_the_channel_of_the_truth():
    images = np.stack([np.arange(16), np.full(16, 9)]).astype(np.uint8).reshape(1, 2, 4, 4)
    found = baselines.read_pixel_values(Split(images, np.array([1])), np.array([0]), 1, 4)
    assert (found.values * 255).tolist() == [pytest.approx([2.5, 4.5, 10.5, 12.5])]


def test_other_data_are_skipped_with_the_reason(run, monkeypatch):
    assert "flat images" in measure(TRAIN, TRAIN, axes=3).skipped  # as of a text
    assert "these labels are real numbers" in measure(TRAIN, TRAIN, task=AGES).skipped
    selected = {"methods": [], "seeds": [0], "phases": ["pretrain"]}
    in_run(monkeypatch, run[0], run=selected, pretrain={}, baselines={})
    stage.baselines("pretrain")
    found = read_result("artifacts/measured/baselines/pretrain.json", Found, "baselines")
    assert not isinstance(found, SkipReason) and len(found.values) == 3


def layer(router: dict = TOP2, experts: dict = MLP) -> MoEFeedForward:
    torch.manual_seed(0)
    return MoESettings(router=router, experts=experts, blocks=[0]).build(16)


def test_median_and_quartiles():
    assert cost.compute_median_and_quartiles([5, 1, 4, 2, 3]) == (3, 2, 4)
    assert cost.compute_median_and_quartiles([1, 3]) == (2, 1.5, 2.5)
    assert cost.compute_median_and_quartiles([7]) == (7, 7, 7)
    with pytest.raises(ValueError, match="no values"):
        cost.compute_median_and_quartiles([])


def test_live_bytes_by_hand():
    x = torch.zeros(1000)  # 4000 bytes
    with LiveBytesCounter([x]) as live:
        assert (live.now, live.peak) == (4000, 4000)
        y = x + 1
        y.view(10, 100)[2:].t()  # views hold nothing of their own
        assert live.now == 8000
        z = y * 2
        assert live.now == 12000
        del y
        gc.collect()
        assert live.now == 8000
        z.add_(1)
        w = z[:500] + 1
        assert (live.now, live.peak) == (10000, 12000)
        del w, z
        gc.collect()
        assert (live.now, live.peak) == (4000, 12000)


def test_peak_of_a_chain_of_linears():
    # weights 3 · (100 · 100 + 100) · 4 = 121,200 bytes, images 10 · 100 · 4 = 4000; input and
    # output of a layer live together, and the one before is gone
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))
    found, counted = cost.peak_memory_and_counting_method(model, torch.zeros(10, 100))
    assert (found, counted) == (121_200 + 4000 + 2 * 4000, "live tensors")


def by_hand(tokens: int, width: int, hidden: int, depth: int, sparse: int = 0) -> int:
    """FLOPs of a ViT's image, 4 × 4 patches, 2 heads, 5 classes, but ``sparse`` feed-forwards."""
    patches, head = 2 * (tokens - 1) * 16 * width, 2 * width * 5
    attention = 2 * tokens * width * (3 * width + 2 * tokens + width)
    feed_forward = 2 * (2 * tokens * width * hidden)
    return patches + depth * attention + (depth - sparse) * feed_forward + head


@pytest.mark.parametrize("batch", [1, 3])
def test_flops_of_a_vit_by_hand(batch):
    images = torch.rand(batch, 1, 8, 8)
    vit = Vit(patch=4, width=16, depth=2, heads=2, mlp_ratio=2)
    whole, routing = cost.whole_and_routing_flops(vit.build(TIMED), images)
    assert (whole, routing) == (by_hand(5, 16, 32, 2), 0)
    moe = MoESettings(router=TOP2, experts=MLP, blocks=[1])
    whole, routing = cost.whole_and_routing_flops(vit.build(TIMED, moe), images)
    # 5 tokens: 4 logits each; 2 experts each, two maps 16 → 16
    router, experts = (2 * 5 * 16 * 4, 5 * 2 * 2 * (2 * 16 * 16))
    assert (whole, routing) == (by_hand(5, 16, 32, 2, sparse=1) + router + experts, router)


def test_padding_is_taken_off(monkeypatch):
    # 257 tokens · 2 = 514 pairs of 4 experts are padded to multiples of 8
    tokens, moe = torch.randn(1, 257, 16), layer()
    plan, _ = moe.eval().router(tokens)
    assert isinstance(plan, SparsePlan) and len(plan.order) > 514
    assert cost.padding_share(plan) == 1 - 514 / len(plan.order)
    whole, routing = cost.whole_and_routing_flops(moe, tokens)
    assert routing == 2 * 257 * 16 * 4
    assert whole == pytest.approx(routing + 257 * 2 * 2 * (2 * 16 * 16), abs=1e-6)
    monkeypatch.setattr("moecore.nn.kernels.grouped._MAX_LOOPED_ROWS", 0)
    assert cost.whole_and_routing_flops(moe, tokens) == (whole, routing), "grouped as looped"


def test_routing_is_all_but_the_experts():
    # soft slots, T = 12, E = 4, p = 3: scores, mixing and back are three products of 2·T·E·p·d; the
    # experts see 4 · 3 rows
    slots = layer({"kind": "soft_slots", "slots": 3})
    whole, routing = cost.whole_and_routing_flops(slots, torch.randn(2, 12, 16))
    assert routing == 3 * (2 * 12 * 4 * 3 * 16) and whole == routing + 12 * 2 * (2 * 16 * 16)
    # an eigenbasis router projects every token onto all four bases of rank 8; its experts start
    # from there: 8 → 16 → 16
    eigen = {"kind": "eigen", "number": 4, "hidden_ratio": 1, "rank": 8}
    moe = layer({"kind": "noisy_top_k", "k": 1}, eigen)
    whole, routing = cost.whole_and_routing_flops(moe, torch.randn(1, 12, 16))
    assert routing == 2 * 12 * 16 * 4
    assert whole == routing + 12 * (2 * 16 * 8 + 2 * 8 * 16 + 2 * 16 * 16)


def test_times_have_their_parts_and_leave_the_model_alone():
    moe, tokens = layer().train(), torch.randn(2, 40, 16)
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    state = torch.get_rng_state()
    seen = []

    def images(number: int) -> torch.Tensor:
        seen.append(number)
        return tokens

    found = cost.pass_and_routing_times(moe, images, rounds=4)
    assert len(found) == 4 and all(0 < part.routing < part.total for part in found)
    times = cost.forward_pass_times(moe, images, rounds=2)
    assert len(times) == 2 and min(times) >= 0
    assert seen == [*range(cost.WARM_UP + 4), *range(cost.WARM_UP + 2)]
    assert moe.training and moe.router.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in moe.state_dict().items())
    assert all(parameter.grad is None for parameter in moe.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in moe.modules())


def test_spans_are_read_at_both_ends():
    ticks = iter(range(100))
    moe = layer().eval()
    with cost.measuring_moe_and_teacher_calls(moe, lambda: next(ticks)) as spans:
        moe(torch.randn(1, 5, 16))
    assert [span[:3] for span in spans] == [("experts", 1, 2), ("layer", 0, 3)]


@pytest.fixture(scope="module")
def results(data):
    settings = Cost(batch=8, rounds=3, images=5)
    found = {}
    for name, moe in {"vmoe": top_k_mlps(k=2), "dense": None}.items():
        model = built(Vit(patch=6, width=16, depth=2, heads=2), moe, data, 1)
        found[name] = settings.collect_result(MeasuredModel(model, data), compute_without_cache)
    return found


def test_timings_and_memory(results):
    for found in results.values():
        latency, batch = found.find("latency_ms"), found.find("batch_ms")
        for timing in (latency, batch):
            assert 0 < timing.low <= timing.value <= timing.high
        assert found.find("inference_images_per_second").value == pytest.approx(8000 / batch.value)
        assert found.facts["memory_counted_as"] in ("live tensors", "CUDA allocator")
        assert found.find("peak_memory").value > 4 * found.facts["parameters"]


def test_a_batch_is_timed_with_each_k_that_the_model_can_have(results):
    values = [value for value in results["vmoe"].all("batch_ms") if value.at]
    assert [value.at["k"] for value in values] == [1, 2, 3, 4], "6 of 4 experts cannot be"
    assert all(0 < value.low <= value.value for value in values)
    assert not results["dense"].curve("batch_ms", "k")


def test_counts_of_the_routed_model(results):
    vmoe, dense = results["vmoe"], results["dense"]
    # 5 tokens of width 16: a dense feed-forward is 16 → 64 → 16, two experts are 16 → 16 → 16 each;
    # the router has 4 logits; two blocks.
    router, experts, replaced = 2 * 5 * 16 * 4, 5 * 2 * 2 * (2 * 16 * 16), 5 * 2 * (2 * 16 * 64)
    assert vmoe.find("routing_gflops").value == pytest.approx(2e-9 * router)
    more = vmoe.find("gflops").value - dense.find("gflops").value
    assert more == pytest.approx(2e-9 * (router + experts - replaced))
    for name in ("routing_share", "routing_batch_share"):
        assert 0 < vmoe.find(name).value < 1
    assert vmoe.find("routing_ms").value > 0
    # of 4 experts with 2 · (16 · 16 + 16) parameters each, in 2 blocks, half are idle
    idle = vmoe.facts["parameters"] - vmoe.facts["active_parameters"]
    assert idle == 2 * 2 * 2 * (16 * 16 + 16)


def test_the_passes_go_through_the_images_in_turn():
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).numpy() * 51
    source = cost.build_cyclic_batch_getter(images, 3, "cpu")
    passes = [(source(number).flatten() * 5).round().int().tolist() for number in range(3)]
    assert passes == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert source(0).dtype == torch.float32 and source(0).shape == (3, 1, 1, 1)
