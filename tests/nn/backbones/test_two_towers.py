import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from moecore import ModelOutput, UserError, predict_in_batches
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.backbones import two_towers
from moecore.nn.backbones.base_model import ImageSpec, count_total_and_active_parameters
from moecore.nn.backbones.vit import Vit
from moecore.tasks.image_text import ImageText
from moecore.training import artifacts, loop
from moecore.training.job import Objective, TrainingJob
from moecore.training.method import Method, attach_required_guide, initialise_guide
from moecore.training.settings import Training
from tests.methods import METHODS, REPRESENTATIVE
from tests.training.small import CPU

TASK = ImageText(words=20, context=7, captions=2, end=2, vocabulary="0" * 64)
IMAGE = ImageSpec(channels=1, size=8, mean=(0.5,), std=(0.3,), task=TASK)
TOWER = two_towers.TextTowerSettings(width=16, depth=2, heads=2)
SMALL = two_towers.TwoTowers(image=Vit(patch=4, width=16, depth=4, heads=2), text=TOWER, joint=6)
SETTINGS = Training(epochs=2, batch=10, learning_rate=1e-2, log_every=2, views={"shift": 1})
MOE = {"router": {"kind": "noisy_top_k", "k": 2}, "experts": {"kind": "mlp", "number": 4}}
MOE["regularizers"] = [{"kind": "importance"}, {"kind": "load"}]
TEXT = {"text": MOE | {"blocks": [1]}}


def captions(count: int, seed: int = 0) -> np.ndarray:
    """Two of each image, of one to five words: start, words, end, padding."""
    random = np.random.default_rng(seed)
    found = np.zeros((count, 2, 7), np.int32)
    for row in found.reshape(-1, 7):
        words = int(random.integers(1, 6))
        row[0] = 1
        row[1 : 1 + words] = random.integers(4, 20, words)
        row[1 + words] = 2
    return found


def split(count: int, seed: int = 0) -> Split:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 1, 8, 8))
    return Split(pixels.astype(np.uint8), captions(count, seed))


def captioned(method: Method | dict, backbone: two_towers.TwoTowers = SMALL) -> TrainingJob:
    method = Method.model_validate(method)
    torch.manual_seed(0)
    guide = initialise_guide(SMALL.build(IMAGE), method, (4,)) if method.guided else None
    model = method.merge_model_settings(backbone).build(IMAGE, method.moe)
    objective = Objective(method.losses, text=method.text_losses)
    loaded = (load_split_where_it_fits(images, "cpu") for images in (split(40), split(12, 1)))
    return TrainingJob(model, *loaded, objective, guide, method.views)


def fit(job: TrainingJob) -> list[dict[str, float]]:
    return [metrics.values for metrics in loop.iterate_training(job, SETTINGS, 0, CPU)]


@torch.no_grad()
def slow(tower: two_towers.TextTransformer, tokens: list[int], quick: bool = False) -> torch.Tensor:
    """CLIP's text encoder as it is written down: one caption, one head and one token at a time."""
    heads, width = tower.config.heads, tower.config.width
    size = width // heads
    hidden = tower.embedding.weight[tokens] + tower.positions
    for block in tower.blocks:
        qkv = block.norm1(hidden) @ block.attn.qkv.weight.T + block.attn.qkv.bias
        attended = torch.zeros_like(hidden)
        for place in range(len(tokens)):
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                query = qkv[place, :width][part]
                keys = qkv[: place + 1, width : 2 * width][:, part]
                values = qkv[: place + 1, 2 * width :][:, part]
                shares = torch.softmax(keys @ query / math.sqrt(size), dim=0)
                attended[place, part] = shares @ values
        hidden = hidden + attended @ block.attn.proj.weight.T + block.attn.proj.bias
        inner = block.norm2(hidden) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
        share = (1 + torch.erf(inner / math.sqrt(2))) / 2
        inner = inner * (1 / (1 + torch.exp(-1.702 * inner)) if quick else share)
        hidden = hidden + inner @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    return tower.projection.weight @ tower.norm(hidden)[tokens.index(2)]


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_the_text_tower_is_clips(activation):
    torch.manual_seed(1)
    config = two_towers.TextTowerSettings(width=16, depth=2, heads=2, activation=activation)
    tower = two_towers.TextTransformer(config, TASK.model_copy(update={"width": 6})).eval()
    tokens = torch.from_numpy(captions(5).reshape(-1, 7))
    found, records = tower(tokens)
    assert records == ()
    expected = [slow(tower, row.tolist(), activation == "quick_gelu") for row in tokens]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_what_pads_takes_no_place_in_training_either():
    torch.manual_seed(1)
    inner = {"kind": "noisy_top_k", "noise_std": 0}
    router = {"kind": "depth", "share": 0.5, "sampling": "bce", "router": inner}
    text = {"router": router, "experts": {"kind": "mlp", "number": 4}, "blocks": "all"}
    tower = captioned({"text": text}).model.text.train()
    padding = torch.randint(3, 20, (8, 3))
    tokens = torch.cat([torch.tensor([[1, 5, 6, 2]]).expand(8, 4), padding], dim=1)
    sides, (first, second) = tower(tokens)
    torch.testing.assert_close(sides, sides[:1].expand(8, -1))
    for record in (first, second):  # of four words two; the router says so of each
        assert record.chosen.any(dim=-1).view(8, 4).sum(dim=1).tolist() == [2] * 8
        penalty = record.penalty.view(8, 4)
        torch.testing.assert_close(penalty, penalty[:1].expand(8, 4))


def test_what_pads_changes_nothing_under_a_causal_mask():
    torch.manual_seed(1)
    model = SMALL.build(IMAGE).eval()
    tokens = torch.tensor([[1, 5, 6, 2, 0, 0, 0], [1, 5, 6, 2, 9, 8, 7]])
    first, second = model.text(tokens)[0]
    torch.testing.assert_close(first, second)
    text = two_towers.TextTowerSettings(width=16, heads=2, mask="full")
    full = two_towers.TwoTowers(image=SMALL.image, text=text).build(IMAGE)
    first, second = full.eval().text(tokens)[0]
    assert not torch.allclose(first, second)  # SigLIP's attends to them


def test_a_class_token_reads_the_whole_context():
    torch.manual_seed(1)
    text = two_towers.TextTowerSettings(width=16, heads=2, mask="full", pooling="class")
    model = two_towers.TwoTowers(image=SMALL.image, text=text, joint=6).build(IMAGE)
    found = model.targets(torch.from_numpy(captions(3)))
    assert found.shape == (3, 2, 9) and model.text.last is not None
    model.text(torch.from_numpy(captions(3)[:, 0]))[0].square().sum().backward()
    assert float(model.text.last.grad.abs().sum()) > 0


def test_sides_have_length_one_times_the_scale():
    model = SMALL.build(IMAGE).eval()
    images = torch.rand(4, 1, 8, 8)
    sides = model(images).prediction
    torch.testing.assert_close(sides[:, :-1].norm(dim=1), torch.full((4,), 1 / 0.07))
    assert (sides[:, -1] == 0).all()
    texts = model.targets(torch.from_numpy(captions(4)))
    torch.testing.assert_close(texts[..., :6].norm(dim=-1), torch.ones(4, 2))
    sides = SMALL.model_copy(update={"pairs": "sigmoid"}).build(IMAGE).eval()(images).prediction
    assert (sides[:, -1] == -10).all()
    torch.testing.assert_close(sides[:, :-1].norm(dim=1), torch.full((4,), 10.0))


def test_the_scale_ends_at_100_and_comes_back():
    job = captioned(METHODS["dense"])
    job.model.logit_scale.data.fill_(9.0)
    job.model.end_step(ModelOutput(torch.zeros(())), 0.0)
    assert job.model.logit_scale.exp().item() == pytest.approx(100)
    fit(job)  # captions at random: an untrained model is too sure of them
    assert job.model.logit_scale.exp().item() < 99


def test_marks_tell_captions_apart():
    tokens = torch.from_numpy(captions(3000, 5).reshape(-1, 7))
    found = two_towers.caption_fingerprints(tokens)
    assert (found < 2**23).all() and torch.equal(found, found.round())
    assert len(torch.unique(found, dim=0)) == len(torch.unique(tokens, dim=0)) > 3000


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_method_trains_in_the_image_tower_beside_experts_of_words(tmp_path, name):
    job = captioned(METHODS[name].model_copy(update={"text": Method.model_validate(TEXT).text}))
    values = fit(job)
    assert all(torch.isfinite(torch.tensor(list(found.values()))).all() for found in values)
    assert {"task", "text_importance", "text_load", "train_recall_at_1"} <= set(values[-1])
    model = attach_required_guide(job.model, job.guide)
    artifacts.save_model(tmp_path, model)
    loaded = artifacts.load_model(tmp_path)
    images = split(7, 2).images
    expected, _ = predict_in_batches(model, images, batch=7)
    words = torch.from_numpy(captions(7, 2))
    texts = model.targets(words)
    for batch in (1, 3):
        logits, _ = predict_in_batches(loaded, images, batch)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        part = loaded.targets(words[:batch])
        torch.testing.assert_close(part, texts[:batch], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["vmoe", "ermoe", "stable_moe"])
def test_routers_of_the_text_tower(name):
    entry = METHODS[name]
    job = captioned({"text": {"router": entry.router, "experts": entry.experts, "blocks": (1,)}})
    fit(job)
    tokens = torch.from_numpy(captions(5)[:, 0])
    _, records = job.model.eval().text(tokens)
    spoken = int(job.model.text.caption_mask(tokens).sum())
    assert [record.probs.shape for record in records] == [(1, spoken, entry.experts.number)]
    alone = [job.model.text(row[None])[0] for row in tokens]
    torch.testing.assert_close(torch.cat(alone), job.model.text(tokens)[0], atol=1e-5, rtol=1e-4)


def test_routers_that_look_at_what_captions_do_not_have_are_refused():
    text = {"router": {"kind": "hash"}, "experts": {"kind": "mlp", "number": 4}, "blocks": [1]}
    with pytest.raises(UserError, match="text.router.kind: found hash, which reads patches"):
        captioned({"text": text})
    prc = MOE | {"regularizers": [{"kind": "pairwise_consistency"}]}
    with pytest.raises(ValidationError, match="pairwise_consistency needs two_views, which capt"):
        Method.model_validate({"text": prc})
    with pytest.raises(ValidationError, match="a dense text tower routes nothing"):
        Method.model_validate({"text": {"regularizers": [{"kind": "importance"}]}})
    with pytest.raises(UserError, match="text: no text tower"):
        Method.model_validate(TEXT).merge_model_settings(SMALL.image)


def test_a_frozen_tower_stays_as_it_is_and_draws_nothing():
    job = captioned({"text": TEXT["text"] | {"frozen": "always"}})
    before = {name: value.clone() for name, value in job.model.text.state_dict().items()}
    fit(job)
    assert all(torch.equal(before[n], value) for n, value in job.model.text.state_dict().items())
    job.model.train()
    assert job.model.visual.training and not job.model.text.training
    learned = captioned({"text": TEXT["text"] | {"frozen": "finetune"}})
    fit(learned)
    assert not torch.equal(before["embedding.weight"], learned.model.text.embedding.weight)
    learned.model.begin_finetuning()
    assert not any(parameter.requires_grad for parameter in learned.model.text.parameters())


def test_it_goes_on_with_larger_images_and_the_same_words(tmp_path):
    model = captioned(Method()).model.eval()
    artifacts.save_model(tmp_path, model)
    larger = IMAGE.model_copy(update={"size": 16})
    moved = artifacts.load_adapted_model(tmp_path, larger, None)
    assert moved.layout.grid == (4, 4)
    words = torch.from_numpy(captions(3))
    assert torch.equal(moved.targets(words), model.targets(words))
    same = artifacts.load_adapted_model(tmp_path, IMAGE, None)
    assert torch.equal(same.visual.pos_embed, model.visual.pos_embed)
    other = larger.model_copy(update={"task": TASK.model_copy(update={"vocabulary": "1" * 64})})
    with pytest.raises(UserError, match="other words: captions of 20 words"):
        artifacts.load_adapted_model(tmp_path, other, None)


def test_active_parameters_are_those_of_both_towers():
    one = captioned(MOE | TEXT).model
    found = count_total_and_active_parameters(one)
    idle = sum(value.numel() for name, value in one.named_parameters() if ".experts." in name)
    assert found["parameters"] - found["active_parameters"] == idle // 2  # two of four, in both
