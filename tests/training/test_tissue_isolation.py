"""Volumes that keep one tissue; fewer experts out of a trained model."""

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from moecore.backbones import LanguageModel, MoESettings, Vit, Vit3d
from moecore.core.files import UserError
from moecore.core.routing_records import Batch, ObjectiveInputs, TokenLayout
from moecore.core.safetensors_files import read_tensors
from moecore.core.streams import BatchDraws
from moecore.data.layouts.text import cut_labelled_blocks
from moecore.data.loader import TextStreams, load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.experts import Eigen, Mlp
from moecore.measure.routing_metrics.epoch_routing import route_single_tissues
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.predict import eval_mode, score_last_blocks, text_perplexity
from moecore.nn.routers.expert_choice import ExpertChoice
from moecore.nn.routers.teacher_routed import TeacherRouted
from moecore.routers import Cosine, Depth, Dynamic, Eigenbasis, Folded, Hash, NoisyTopK, Relu, TopP
from moecore.tasks.next_token import NextToken
from moecore.teachers import Training, ViewSettings
from moecore.testing.check_helpers import IMAGE, small_data, small_vit
from moecore.training.artifacts import Checkpoint, load_model, save_model
from moecore.training.job import Objective, TrainingJob, training_batch
from moecore.training.loop import iterate_training
from moecore.training.method import Method
from moecore.training.single_tissue_volumes import (
    NO_TISSUE,
    TissueIsolationSchedule,
    build_tissue_isolation,
    find_mask_channels,
)
from moecore.training.surgery.expert_reduction import ExpertUseSums, measure_expert_use
from moecore.training.surgery.merge import Merge, cluster_experts, member_shares, merge_parameter
from moecore.training.surgery.prune import Prune
from tests.data.making import VOLUMES, balls
from tests.training.small import CPU, assert_resumes

EIGEN = {"kind": "eigen", "number": 5, "hidden_ratio": 1}
PLAIN = {"router": {"kind": "eigenbasis", "k": 2, "context": "learned"}, "experts": EIGEN}
TAUGHT = {"experts": ["wm", "gm", "csf"], "warm_start_epochs": 2}
METHOD = Method(**PLAIN, regularizers=[{"kind": "orthogonality"}], regions=TAUGHT)


def of_regions(**changed) -> Method:
    return METHOD.model_copy(update={"regions": METHOD.regions.model_copy(update=changed)})


RATES = {"learning_rate": 2e-3, "warmup_epochs": 0}
SETTINGS = Training(epochs=3, batch=6, log_every=4, views=ViewSettings(flip=True), **RATES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return balls(tmp_path_factory.mktemp("balls"))


def task(data, method=METHOD):
    torch.manual_seed(0)
    vit = Vit3d(patch=4, width=24, depth=4, heads=2, mlp_ratio=2, stem="pooled", pool=2)
    splits = (load_split_where_it_fits(split, "cpu") for split in (data.train, data.validation))
    isolation = build_tissue_isolation(method, data)
    model, objective = vit.build(VOLUMES, method.moe), Objective(method.losses)
    return TrainingJob(model, *splits, objective, None, method.views, isolation)


def assert_kept(data, kept, volumes, indices, region) -> None:
    """Each volume that is not whole keeps the voxels of its one tissue, and nothing else."""
    for place, (index, tissue) in enumerate(zip(indices.tolist(), region.tolist(), strict=True)):
        if tissue != NO_TISSUE:
            inside = torch.tensor(data.regions("train")[index, tissue]) == 255
            assert torch.equal(kept[place, 0][inside], volumes[place, 0][inside])
            assert (kept[place, 0][~inside] == 0).all()


def isolated(made, volumes, indices, step: int, epoch: int):
    draws = BatchDraws(torch.Generator().manual_seed(step), len(indices))
    return made.isolate_volumes(volumes, indices, step, epoch, draws)


def test_each_volume_keeps_one_tissue_in_turn(data):
    made, indices = build_tissue_isolation(METHOD, data), torch.tensor([3, 5, 7, 9])
    volumes = torch.tensor(data.train.images[indices.numpy()])
    for step in range(3):
        kept, region = isolated(made, volumes, indices, step, 1)
        assert region.tolist() == [(place + step) % 3 for place in range(4)]
        assert kept.dtype == torch.float16 and (kept.flatten(1).sum(1) > 0).all()
        assert_kept(data, kept, volumes, indices, region)


def test_the_order_of_the_experts_names_the_maps_and_without_a_warm_start_there_is_none(data):
    method = of_regions(experts=("csf", "wm"))
    assert build_tissue_isolation(method, data).channels == (2, 0)
    assert method.expert_names == ("csf", "wm", "free_2", "free_3", "free_4")
    assert METHOD.model_copy(update={"regions": None}).expert_names[1] == "expert_1"
    plain = of_regions(warm_start_epochs=0)
    assert build_tissue_isolation(plain, data) is None
    assert [loss.kind for loss in plain.losses] == ["orthogonality"]


def test_tokens_with_any_voxel_of_the_tissue_belong_to_its_expert():
    made = TissueIsolationSchedule(None, (0, 1), range(1), 0.0)
    layout = TokenLayout(1, (2, 1, 1), (4, 2, 2))
    views = torch.zeros(3, 1, 4, 2, 2)
    views[0, 0, 3, 1, 1] = 0.2  # the second cube of the first view
    views[1:] = 0.5
    found = made.find_token_experts(views, torch.tensor([0, 1, NO_TISSUE]), layout)
    expected = [[-1, -1, 0], [-1, 1, 1], [-1, -1, -1]]  # class token, two cubes
    assert found.dtype == torch.int64 and found.tolist() == expected
    batch = Batch(views, torch.zeros(3), None)
    assert made.mark_experts(batch, torch.full((3,), NO_TISSUE), 0, layout) is batch


def test_it_ends_with_its_epochs(data):
    made = task(data)  # 24 volumes in batches of 6: 4 steps an epoch
    assert training_batch(made, SETTINGS, 0, 7).belongs is not None
    whole = training_batch(made, SETTINGS, 0, 8)
    assert whole.belongs is None and whole.learned is None
    assert (whole.images > 0).float().mean() > 0.1
    two = training_batch(made._replace(views=2), SETTINGS, 0, 7)
    assert two.belongs.shape == (12, 65)
    assert (two.images[:6] > 0).sum() == (two.images[6:] > 0).sum()


def test_afterwards_a_share_of_the_volumes_keeps_one_tissue(data):
    method = of_regions(isolated=0.25)
    made, indices, counts = build_tissue_isolation(method, data), torch.arange(12), torch.zeros(4)
    volumes = torch.tensor(data.train.images[:12])
    for step in range(200):
        kept, region = isolated(made, volumes, indices, step, 2)
        again = isolated(made, volumes, indices, step, 2)
        assert torch.equal(kept, again[0]) and torch.equal(region, again[1]), "depends on the step"
        assert torch.equal(kept[region == NO_TISSUE], volumes[region == NO_TISSUE])
        assert_kept(data, kept, volumes, indices, region)
        counts += torch.bincount(region + 1, minlength=4)
    shares = counts / counts.sum()
    assert abs(shares[0] - 0.75) < 0.04 and (shares[1:] - 0.25 / 3).abs().max() < 0.02, shares


def test_a_subset_has_its_own_maps_and_the_warm_start_may_come_later(data):
    subset, whole = torch.tensor([4, 9, 2]), torch.tensor(data.train.images[[4, 9, 2]])
    made = build_tissue_isolation(METHOD, data, subset.numpy())
    found, _ = isolated(made, whole, torch.arange(3), 0, 0)
    same, _ = isolated(build_tissue_isolation(METHOD, data), whole, subset, 0, 0)
    assert torch.equal(found, same)
    made = task(data, of_regions(after=1, warm_start_epochs=1, isolated=0.5))  # 4 steps per epoch
    first, warm, later = (training_batch(made, SETTINGS, 0, step) for step in (3, 4, 8))
    assert first.belongs is None and first.learned is None
    assert warm.learned is None and (warm.belongs >= 0).any(dim=1).all()
    apart = (later.belongs >= 0).any(dim=1)
    assert apart.any() and later.learned.tolist() == (~apart).nonzero()[:, 0].tolist() != []


def test_later_isolated_volumes_teach_the_routers_and_not_age(data):
    made = task(data, of_regions(warm_start_epochs=0, isolated=0.5))
    batch = training_batch(made, SETTINGS, 0, 0)
    changed = batch._replace(labels=batch.labels.clone())
    changed.labels[(batch.belongs >= 0).any(dim=1)] += 100  # the ages of isolated volumes
    output, learned = made.model(batch.images), batch.learned
    given = [ObjectiveInputs(one, output, made.model) for one in (batch, changed)]
    terms, same = (made.objective.terms(one) for one in given)
    assert terms["task"] == same["task"] and terms["region_routing"] > 0
    assert terms["task"] == made.task.loss(output.prediction[learned], batch.labels[learned])


def test_every_batch_keeps_a_whole_volume_after_the_warm_start(data):
    made = build_tissue_isolation(of_regions(isolated=0.99), data)
    volumes, indices = torch.zeros(2, 1, 16, 16, 16), torch.tensor([0, 1])
    for step in range(50):
        assert (isolated(made, volumes, indices, step, 5)[1] == NO_TISSUE).any()


def test_scores_find_their_tissue_more_than_the_random_control(data):
    method = of_regions(warm_start_epochs=16).model_copy(update={"blocks": (1,)})
    torch.manual_seed(0)
    vit = Vit3d(patch=8, width=24, depth=2, heads=2, mlp_ratio=2, stem="pooled")
    model = vit.build(VOLUMES, method.moe)
    before = model.blocks[1].mlp.router.target.clone()
    settings = SETTINGS.model_copy(update={"epochs": 16, "batch": 12, "learning_rate": 1e-2})
    made = task(data, method)._replace(model=model)
    terms = [one.values["region_routing"] for one in iterate_training(made, settings, 0, CPU)]
    assert terms[-1] < terms[0] / 4 and not torch.equal(model.blocks[1].mlp.router.target, before)
    images, maps = data.validation.images, data.regions("validation")
    found = route_single_tissues(model, images, maps, data.card["regions"], METHOD.expert_names)
    rows, lead = {row.region: row for row in found}, 0.0
    for tissue in ("wm", "gm", "csf"):
        assert rows[tissue].experts[0][0] == tissue
        lead += rows[tissue].share[tissue] - rows[f"random_{tissue}"].share[tissue]
    assert lead / 3 > 0.2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts": None, "router": None}, "dense"),
        ({"regions": {"experts": ["a", "b", "c", "d", "e", "f"]}}, "regions.experts: found 6"),
        ({"regions": {"experts": ["a", "a"]}}, "each tissue once"),
    ],
)
def test_a_method_that_cannot_be_is_refused(change, said):
    with pytest.raises(ValidationError, match=said):
        Method.model_validate(METHOD.model_dump() | change)


def test_tissues_that_the_data_lack_are_named():
    with pytest.raises(UserError, match="found csf, but these data have maps of wm, gm"):
        find_mask_channels(("wm", "csf"), {"regions": ["wm", "gm"]})
    with pytest.raises(UserError, match="no tissue maps"):
        find_mask_channels(("wm",), {})


WORDS, BLOCK, CONTEXT = 12, 4, 2
PLAIN = {"channels": CONTEXT + 1, "mean": (0.0,) * (CONTEXT + 1), "std": (1.0,) * (CONTEXT + 1)}
SPEC = ImageSpec(**PLAIN, size=(BLOCK,), task=NextToken(words=WORDS))
RELU = {"kind": "mlp", "number": 4, "hidden_ratio": 1, "activation": "relu", "init": "flat"}
LOSSES = [{"kind": "group_sparsity", "weight": 1e-2}, {"kind": "load"}]
TOP_2 = {"kind": "top_k_softmax", "k": 2}
SMOE = Method(router=TOP_2, experts=RELU | {"dropout": 0.1}, blocks="all", regularizers=LOSSES)
OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0, "optimizer": {"kind": "adam"}, "clip": None}
TEXT_SETTINGS = Training(epochs=2, updates=6, batch=8, log_every=1, checkpoint_every=2, **OPTIMIZER)


def counting(length: int, seed: int) -> torch.Tensor:
    """A text in which most words follow from the one before."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.where(torch.rand(length, generator=generator) < 0.1, 2, 1)
    return (steps.cumsum(0) % WORDS).int()


def text(method: Method = SMOE, settings: Training = TEXT_SETTINGS, **model) -> TrainingJob:
    torch.manual_seed(0)
    given = {"width": 8, "depth": 2, "heads": 2, "span": 4, "dropout": 0.1} | model
    made = LanguageModel(**given).build(SPEC, method.moe)
    made.remember(settings.batch)
    split = Split(*cut_labelled_blocks(counting(60, 1).numpy(), BLOCK, CONTEXT))
    validation = load_split_where_it_fits(split, "cpu")
    train = TextStreams(counting(300, 0)[None], BLOCK)
    return TrainingJob(made, train, validation, Objective(method.losses))


@pytest.mark.parametrize("stop", [3, 9])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, stop):
    assert_resumes(text, TEXT_SETTINGS, tmp_path, stop)
    saved, _ = read_tensors(Checkpoint(tmp_path).path)
    assert saved["model.model.memory.states"].any(), "what the streams left is in the checkpoint"


def test_what_is_saved_is_the_model_alone(tmp_path):
    job = text()
    for _ in iterate_training(job, TEXT_SETTINGS, 0, CPU):
        pass
    save_model(tmp_path, job.model)
    assert not any("memory" in name for name in read_tensors(tmp_path / "model.safetensors")[0])
    loaded = load_model(tmp_path)
    images, labels = (
        torch.tensor(part) for part in cut_labelled_blocks(counting(60, 1).numpy(), 4, 2)
    )
    with eval_mode(job.model):
        torch.testing.assert_close(loaded(images).prediction, job.model(images).prediction)
    assert score_last_blocks(loaded, images, labels).shape == (14,)


@torch.no_grad()
def test_perplexity_is_that_of_the_stream():
    job = text()
    tokens = counting(62, 2)
    model = job.model.eval()
    states = model.initial_states(1, tokens.device)
    nats = []
    for start in range(0, 61, 5):
        words = tokens[None, start : start + 5][:, : 61 - start]
        (final, _, _), states = model.read(words, states)
        following = tokens[None, start + 1 : start + 1 + words.shape[1]].long()
        nats.append(model.image.task.token_loss(model.predict(final), following).flatten())
    every = torch.cat(nats)
    assert len(every) == 61
    near = partial(pytest.approx, abs=1e-4)
    assert text_perplexity(model, tokens[None], 1, False) == near(float(every.mean().exp()))
    assert text_perplexity(model, tokens[None], 1) == near(float(every[:60].mean().exp()))
    apart = [text_perplexity(model, part[None], 1) for part in (tokens[:31], tokens[31:])]
    together = float(torch.tensor(apart).log().mean().exp())  # each from an empty cache
    assert text_perplexity(model, tokens[None], 2) == near(together)


IMAGES = torch.rand(6, 1, 8, 8)
BIAS = NoisyTopK(score="sigmoid", balance={"kind": "loss_free"})
RESIDUAL = NoisyTopK(residual=True)


def settings(router=None, experts=None) -> MoESettings:
    experts = experts or Mlp(number=4)
    return MoESettings(router=router or NoisyTopK(), experts=experts, blocks="all")


def test_reap_is_the_mean_over_the_tokens_that_chose_an_expert():
    # Fixture D3: lengths of the outputs, token by token: 5 1 2 | 1 10 √2 | 1 2 √5. Expert 0 is used
    # by tokens 0 and 2: (0.7 · 5 + 0.9 · 1) / 2 = 2.2; expert 1 by all: (0.3 + 2 + 0.2) / 3; expert
    # 2 by token 1: 0.8 · √2.
    outputs = torch.tensor(
        [[[3.0, 4], [1, 0], [0, 2]], [[0, 1], [6, 8], [1, 1]], [[1, 0], [0, 2], [2, 1]]]
    )
    combine = torch.tensor([[0.7, 0.3, 0], [0, 0.2, 0.8], [0.9, 0.1, 0]], dtype=torch.float64)
    sums = ExpertUseSums(3)
    sums.tokens = 3
    for expert in range(3):
        weights = combine[:, expert]
        sums.add_outputs(expert, outputs[:, expert], weights, weights > 0)
    use = sums.average()
    assert use.counts.tolist() == [2, 3, 1]
    assert use.reap.tolist() == pytest.approx([2.2, 0.833333, 1.131371], abs=1e-6)
    torch.testing.assert_close(use.means[1], torch.tensor([7 / 3, 10 / 3], dtype=torch.float64))


def test_the_nearest_clusters_are_joined_and_averaged_by_their_tokens():
    # Fixture D4: 0 and 1 lie 1 apart; 2 lies 3 and √10 from these, 3.081139 on average; 3 is 4 from
    # 2. (3 · 1 + 1 · 5 + 2 · 2) / 6 = 2. Of a cluster that no token chose: the plain mean.
    means = torch.tensor([[0.0, 0], [1, 0], [0, 3], [4, 3]])
    labels, heights = cluster_experts(means, 2, "average")
    assert labels.tolist() == [0, 0, 0, 1] and heights == pytest.approx((1, 3.081139), abs=1e-6)
    merged = partial(merge_parameter, torch.tensor([[1.0], [5], [2], [4]]))
    counts = torch.tensor([3, 1, 2, 2])
    assert merged(member_shares(labels, counts, 2)).flatten().tolist() == [2, 4]
    none = merged(member_shares(labels, torch.tensor([0, 0, 0, 2]), 2)).flatten()
    assert none.tolist() == pytest.approx([8 / 3, 4])
    assert cluster_experts(means, 2, "single")[1] == (1, 3)
    assert cluster_experts(means, 2, "complete")[1] == pytest.approx((1, 10**0.5))


def test_weights_and_probs_are_summed_within_clusters():
    # Fixture D4: probs 0.4, 0.3, 0.2, 0.1 with clusters 0, 0, 0, 1; both chosen are in the first.
    router = Folded(router=NoisyTopK(k=2, renormalise=True), experts=4).build(1, 2).eval()
    router.clusters.copy_(torch.tensor([0, 0, 0, 1]))
    router.router.weight.data.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1]).log().unsqueeze(1))
    plan, record = router(torch.ones(1, 1, 1))
    torch.testing.assert_close(record.probs[0, 0], torch.tensor([0.9, 0.1]))
    torch.testing.assert_close(record.combine[0, 0], torch.tensor([1.0, 0]))
    assert record.chosen.tolist() == [[[True, False]]]
    torch.testing.assert_close(plan.combine(plan.dispatch(torch.ones(1, 1, 1)).values).item(), 1.0)


@pytest.mark.parametrize(
    "moe",
    [
        *(None, settings(Eigenbasis()), settings(BIAS, Mlp(number=4, shared=1))),
        *map(settings, (NoisyTopK(), Cosine(), TopP(), Relu(), RESIDUAL)),
    ],
)
@pytest.mark.parametrize("by", ["reap", "load"])
def test_a_pruned_model_is_the_whole_one_that_never_chooses_the_others(moe, by, tmp_path):
    model = small_vit(moe=moe)
    uses = measure_expert_use(model, small_data().train, 24)
    prune = Prune(left=0.75, by=by)
    save_model(tmp_path, prune.reduce_experts(model, uses))
    pruned = load_model(tmp_path)(IMAGES)
    dropped_before = None
    for name, use in uses.items():
        kept = prune.select_remaining_experts(model.moe, use)
        dropped = ~torch.isin(torch.arange(4), kept)
        assert dropped[(use.reap if by == "reap" else use.counts).argmin()]
        layer = model.get_submodule(name)
        # of the map of the logits of the layer before, those of its dropped experts are gone
        if getattr(layer.router, "residual", None) is not None and dropped_before is not None:
            layer.router.residual.data[:, dropped_before] = 0
        _never_choose(layer, dropped)
        dropped_before = dropped
    whole = model(IMAGES)
    torch.testing.assert_close(pruned.prediction, whole.prediction, atol=1e-5, rtol=1e-4)
    assert torch.equal(pruned.routing[-1].chosen, whole.routing[-1].chosen[..., kept])


def _never_choose(layer, dropped):
    """Have a layer's router see logits of −10⁴ for these experts: cosines of −1 from a basis."""
    router = layer.router
    if hasattr(router, "logits"):
        logits = router.logits
        router.logits = lambda tokens: logits(tokens).masked_fill(dropped, -1e4)
    else:
        decide = router.decide
        router.decide = lambda scores: decide(scores.masked_fill(dropped, -1.0))


@pytest.mark.parametrize("fold", [True, False])
def test_equal_experts_merge_without_a_change(fold, tmp_path):
    torch.manual_seed(0)
    model = small_vit(moe=settings(NoisyTopK(renormalise=True)))
    for layer in (block.mlp for block in model.blocks):
        for values in layer.experts.parameters():
            values.data[2:] = values.data[:2]  # 0 and 2 are one, 1 and 3
    save_model(tmp_path, Merge(left=0.5, fold=fold).reduce_model(model, small_data().train))
    merged, before = load_model(tmp_path)(IMAGES), model(IMAGES)
    torch.testing.assert_close(merged.prediction, before.prediction, atol=1e-5, rtol=1e-4)
    shares = before.routing[0].probs
    if fold:
        assert merged.routing[0].probs.shape[-1] == 2
        shares = shares.unflatten(-1, (2, 2)).sum(dim=-2)
    torch.testing.assert_close(merged.routing[0].probs, shares)


@pytest.mark.parametrize(
    ("reduction", "moe", "message"),
    [
        (Prune(left=0.25), settings(), "prune.left: found 0.25, .* 1 of 4 .*leave 2 .*to 3"),
        (Merge(left=0.8), settings(), "merge.left: found 0.8, which leaves 4 of 4.*allowed: .*2"),
        (Prune(), settings(NoisyTopK(k=3)), "prune.left: .*leaves 2 of 4.*leave 3"),
        (Prune(), settings(Hash()), "router.kind: found hash.*allowed: routers that learn"),
        (Prune(), settings(ExpertChoice()), "router.kind: found expert_choice.*by which tokens"),
        (Merge(), settings(TeacherRouted()), "router.kind: found teacher_routed.*allowed"),
        (
            Prune(),
            settings(experts=Mlp(number=4, shared=3)),
            "experts.number: found 2 remaining experts: shared: found 3; allowed: 0 to 1",
        ),
        (Merge(), settings(BIAS), "router.balance: found loss_free.*or merge.fold: false"),
        (Merge(), settings(Dynamic()), "router.kind: found dynamic.*or merge.fold: false"),
        (Merge(), settings(RESIDUAL), "router.residual: found true.*or merge.fold: false"),
        (Merge(), settings(Depth()), "router.kind: found depth.*or merge.fold: false"),
        (Prune(), settings(Folded(router=Hash())), "router.kind: found folded.*allowed"),
        (Merge(), settings(experts=Eigen(number=4)), "experts.kind: found eigen.*allowed: mlp"),
    ],
)
def test_what_cannot_have_fewer_experts_is_refused_in_one_line(reduction, moe, message):
    model = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE, moe)
    with pytest.raises(UserError, match=f"^{message}") as error:
        reduction.reduce_model(model, small_data().train)
    assert "\n" not in str(error.value)


def test_groups_of_experts_stay_equal_or_are_refused():
    moe = settings(NoisyTopK(k=1, groups={"number": 2, "kept": 1}))
    uses = measure_expert_use(model := small_vit(moe=moe), small_data().train, 24)
    uneven = {name: use._replace(reap=torch.tensor([1.0, 2, 3, 4])) for name, use in uses.items()}
    with pytest.raises(UserError, match=r"^router.groups: found 2, .*\[0, 2\].*allowed: null"):
        Prune().reduce_experts(model, uneven)
    even = {name: use._replace(reap=torch.tensor([1.0, 2, 1, 2])) for name, use in uses.items()}
    assert Prune().reduce_experts(model, even)(IMAGES).prediction.isfinite().all()
