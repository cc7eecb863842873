import json
import logging
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pyautoattack import AutoAttack
from pyautoattack.autopgd_base import APGDAttack
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import moecore
from moecore import LogitsModel, ModelOutput, RoutingRecord, Target, UserError
from moecore.attacks import Fgsm, autoattack, base, fab, pgd, square
from moecore.attacks import gradient as module
from moecore.attacks.apgd import Apgd, apgd_ascent
from moecore.attacks.base import seed_generator_per_image
from moecore.attacks.surrogate import RouterAttacks, Surrogate
from moecore.backbones import MoESettings, Vit
from moecore.data.prepared import Prepared, Split
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.lipschitz_lemma import soft_top_k_weights, soften_model
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.pipeline.cli import app
from moecore.predict import robustbench
from moecore.testing import check_attack
from moecore.training.artifacts import save_model
from tests.attacks.models import CLASSES, SETS, YEARS, Curved, Linear, Plain, Smooth, vit
from tests.measure.subjects import built, digits
from tests.nn.layers.test_layers import ROUTERS, images

IMAGES, STEPS, QUERIES = 10, 12, 150
NORMS = {"linf": "Linf", "l2": "L2"}
QUIET = logging.getLogger("auto-attack")
SMALL = autoattack.Autoattack(steps=6, queries=30)
PARTS = [SMALL, fab.Fab(steps=5), square.Square(queries=40)]
SPARSE = {"kind": "noisy_top_k", "k": 1}
EPSILON = 0.02
CAPPED = {"kind": "noisy_top_k", "k": 1, "eval_capacity_factor": 0.5, "group_size": 3}


def case(model, images: int = IMAGES, side: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and as labels what the model answers, but for one image."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(images, 1, side, side, generator=generator)
    labels = model(pixels).prediction.argmax(1).detach()
    labels[3] = (labels[3] + 1) % 3
    return pixels, labels


def run(attack, model, images, labels, epsilon, task=CLASSES, seed=0):
    return attack(
        model, task, images, labels, epsilon, seed_generator_per_image(seed, range(len(images)))
    )


@contextmanager
def drawn_by(generator: torch.Generator):
    """The package draws from one image's generator, and sets no seed."""
    rand, randn = torch.rand, torch.randn
    with (
        patch("torch.rand", lambda shape: rand(shape, generator=generator)),
        patch("torch.randn", lambda shape: randn(shape, generator=generator)),
        patch("torch.random.manual_seed", lambda seed: None),
    ):
        yield


def authors(model, images, labels, epsilon, norm, version="standard", attacks=None):
    """Adversarial images of the package, image by image: it shares squares among a batch."""
    changed = []
    others = model(images).prediction.shape[1] - 1
    if attacks:
        version = "custom"
    for image, label, generator in zip(
        images.split(1),
        labels.split(1),
        seed_generator_per_image(0, range(len(images))),
        strict=True,
    ):
        options = {"eps": epsilon, "norm": NORMS[norm], "version": version, "attacks": attacks}
        theirs = AutoAttack(lambda x: model(x).prediction, **options, seed=0)
        for part in (theirs.apgd, theirs.apgd_targeted, theirs.fab):
            part.n_iter = STEPS
            shares = (max(int(share * STEPS), 1) for share in (0.22, 0.06, 0.03))
            part.n_iter_2, part.n_iter_min, part.size_decr = shares
        theirs.apgd_targeted.n_target_classes = theirs.fab.n_target_classes = others
        theirs.square.n_queries = QUERIES
        QUIET.setLevel(logging.ERROR)
        with drawn_by(generator):
            attacked, _ = theirs.run_standard_evaluation(image, label, batch_size=1)
        changed.append(attacked)
    return torch.cat(changed)


def assert_same(images, ours, theirs, atol=1e-4):
    is_changed = [(attacked != images).flatten(1).any(1) for attacked in (ours, theirs)]
    assert torch.equal(*is_changed) and 0 < is_changed[0].sum() < len(images)
    assert torch.allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.02), ("l2", 0.1)])
@pytest.mark.parametrize("version", ["standard", "plus"])
def test_the_ensemble_is_the_authors_image_by_image(version, norm, epsilon):
    model = Smooth(side=8)
    images, labels = case(model)
    attack = autoattack.Autoattack(version=version, norm=norm, steps=STEPS, queries=QUERIES)
    ours = run(attack, model, images, labels, epsilon)
    assert_same(images, ours, authors(model, images, labels, epsilon, norm, version))


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.03), ("l2", 0.15)])
@pytest.mark.parametrize("kind", ["fab-t", "fab", "square"])
def test_each_part_is_the_authors_image_by_image(kind, norm, epsilon):
    model = Smooth(side=8)
    images, labels = case(model)
    attacks = {
        "fab-t": fab.Fab(norm=norm, steps=STEPS),
        "fab": fab.Fab(norm=norm, steps=STEPS, aim="nearest", restarts=5),
        "square": square.Square(norm=norm, queries=QUERIES),
    }
    ours = run(attacks[kind], model, images, labels, epsilon)
    restarts = {"fab": 5}.get(kind, 1)
    build = AutoAttack.__init__

    def with_restarts(self, *args, **options):
        build(self, *args, **options)
        self.fab.n_restarts = restarts

    with patch.object(AutoAttack, "__init__", with_restarts):
        theirs = authors(model, images, labels, epsilon, norm, attacks=[kind])
    assert_same(images, ours, theirs, atol=1e-3)  # fab rounds otherwise


@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_apgd_in_l2_is_the_authors_step_by_step(loss):
    model = Smooth(side=8)
    images, labels = case(model)
    ball = base.Ball(images, 0.3, "l2")
    start = base.random_start(ball, seed_generator_per_image(0, range(IMAGES)))
    assert ball.lengths(start - images).max() <= 0.3 + 1e-6
    options = {"n_iter": 50, "eps": 0.3, "norm": "L2", "loss": loss, "logger": QUIET}
    theirs = APGDAttack(lambda x: model(x).prediction, **options)
    theirs.init_hyperparam(images)
    best, _, values, wrong = theirs.attack_single_run(images, labels, x_init=start)
    objective = {"ce": "cross_entropy", "dlr": "dlr"}[loss]
    goal = module.make_objective(objective, 0, model, CLASSES, images, labels)
    at = module.ModelGradient(model, goal)
    ours = apgd_ascent(at, ball, start, 50, lambda: at.prediction.argmax(1) != labels)
    assert torch.allclose(ours.values, values, atol=1e-4)
    assert torch.allclose(ours.images, best, atol=1e-3)
    assert torch.allclose(ours.wrong, wrong, atol=1e-3)


@pytest.mark.parametrize(
    "attack", [Fgsm(norm="l2"), pgd.Pgd(norm="l2"), Apgd(norm="l2")], ids=lambda attack: attack.name
)
def test_l2_reaches_the_optimum_of_a_linear_model(attack):
    # Far from black and white: x ∓ ε · w / ‖w‖.
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0])
    images, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([1, 0])
    ours = run(attack, Linear(weight), images, labels, 0.2)
    step = (0.2 * weight / weight.norm()).reshape(1, 2, 2)
    assert torch.allclose(ours, images + torch.stack([-step, step]), atol=2e-3)


def test_targeted_dlr_by_hand():
    # −(4 − 1) / (4 − (1 + 0) / 2) for the target of logit 1; positive where the target is ahead.
    logits = torch.tensor([[4.0, 1.0, 2.0, 0.0]] * 2)
    labels, targets = torch.tensor([0, 1]), torch.tensor([1, 0])
    found = module.targeted_dlr_loss(ModelOutput(logits), labels, targets)
    assert found.tolist() == pytest.approx([-3 / 3.5, 3 / 3.5])
    assert module.other_classes_by_likelihood(logits, labels).tolist() == [[2, 1, 3], [0, 2, 3]]


@pytest.mark.parametrize("norm", NORMS)
def test_the_shortest_move_to_a_hyperplane(norm):
    # 2x + y = 2 from (0.5, 0.5), a gap of 0.5. L∞: both move by 1/6. L2: along (2, 1)/5 · 0.5.
    points, normal = torch.full((1, 2), 0.5), torch.tensor([[2.0, 1.0]])
    expected = {"linf": [1 / 6, 1 / 6], "l2": [0.2, 0.1]}[norm]
    found = fab.hyperplane_moves(points, normal, torch.tensor([2.0]), norm)
    assert found[0].tolist() == pytest.approx(expected)
    # Of 2x + y = 2.7 from (0.9, 0.5), x is at its limit of 1, and y moves on by 0.2.
    near = torch.tensor([[0.9, 0.5]])
    found = fab.hyperplane_moves(near, normal, torch.tensor([2.7]), norm)
    assert found[0].tolist() == pytest.approx([0.1, 0.2])
    # Of 2x + y = 4, which no image reaches, both are.
    found = fab.hyperplane_moves(points, normal, torch.tensor([4.0]), norm)
    assert found[0].tolist() == pytest.approx([0.5, 0.5])
    normal[0, 1] = 0
    found = fab.hyperplane_moves(points, normal, torch.tensor([0.5]), norm)
    assert found[0].tolist() == pytest.approx([-0.25, 0])


def test_the_square_lies_where_it_is_drawn():
    images = torch.full((1, 2, 4, 4), 0.5)
    ball = base.Ball(images, 0.1)
    draws = torch.tensor([[0.5, 0.99, 0.9, 0.1]])  # top 1 and left 1 of 0 to 2; signs + and −
    moved = square.propose_square(ball, images, 2, draws) - images
    expected = torch.zeros(1, 2, 4, 4)
    expected[0, 0, 1:3, 1:3], expected[0, 1, 1:3, 1:3] = 0.1, -0.1
    assert torch.allclose(moved, expected, atol=1e-6)


class Watched(Plain):
    """A model that records how many images it is asked for, with or without a gradient."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model, self.asked = model, []

    def forward(self, images):
        self.asked.append(len(images))
        return self.model(images)


def test_survivors_alone_are_attacked_and_packed():
    model = Watched(Smooth(side=8))
    images, labels = case(model, 30)
    model.asked.clear()
    target = Target(model, CLASSES, images, labels, batch=8)
    ours = target.attacked(SMALL, 0.04)
    passes = [*model.asked]
    wrong = target.predict_images(images)[0].argmax(1) != labels
    assert torch.equal(ours[wrong], images[wrong])
    broken = (ours != images).flatten(1).any(1)
    assert torch.equal(target.predict_images(ours)[0].argmax(1) != labels, broken | wrong)
    survivors = int((~broken & ~wrong).sum())
    assert 0 < survivors < 8 < broken.sum()
    # The last passes, of Square, are of all survivors together, from whatever batch.
    assert passes[-2] == survivors


@pytest.mark.parametrize("attack", PARTS, ids=lambda attack: attack.kind)
@pytest.mark.parametrize("norm", NORMS)
def test_the_batch_does_not_matter_and_the_seed_does(attack, norm):
    attack = attack.model_copy(update={"norm": norm})
    model = Smooth(side=8)
    images, labels = case(model, 13)
    epsilon = {"linf": 0.02, "l2": 0.1}[norm]
    target = Target(model, CLASSES, images, labels, batch=13)
    ours = target.attacked(attack, epsilon)
    again = target._replace(batch=4).attacked(attack, epsilon)
    assert torch.allclose(ours, again, atol=1e-5)
    only = torch.arange(13) % 2 == 0
    some = target._replace(only=only).attacked(attack, epsilon)
    assert torch.allclose(some[only], ours[only], atol=1e-5)
    assert torch.equal(some[~only], images[~only])
    if attack.kind != "fab":  # which starts from the image
        assert not torch.equal(target._replace(seed=1).attacked(attack, epsilon), ours)


def test_parts_keep_the_promises_of_attacks():
    for attack in [*PARTS, Apgd(steps=4, objective="targeted_dlr")]:
        check_attack(attack)


@pytest.mark.parametrize("norm", NORMS)
def test_the_best_of_restarts_counts(norm):
    model = Curved(64, classes=4)
    images, labels = case(model)
    attack = pgd.Pgd(steps=4, form="strong", restarts=3, norm=norm)
    best = run(attack, model, images, labels, 0.05)
    generators = seed_generator_per_image(0, range(IMAGES))
    single = attack.model_copy(update={"restarts": 1})
    parts = [single(model, CLASSES, images, labels, 0.05, generators) for _ in range(3)]
    losses = [cross_entropy(model(x).prediction, labels, reduction="none") for x in (best, *parts)]
    assert torch.allclose(losses[0], torch.stack(losses[1:]).amax(0))
    assert (base.Ball(images, 0.05, norm).lengths(best - images) <= 0.05 + 1e-6).all()
    assert pgd.Pgd(steps=4, form="strong", restarts=3).name == "pgd-4-strong-3"


class Noisy(Smooth):
    def forward(self, images):
        output = super().forward(images)
        noise = 0.3 * torch.randn(output.prediction.shape)
        return output._replace(prediction=output.prediction + noise)


def test_rand_averages_gradients_of_a_model_with_noise_and_of_no_other():
    model, attack = Noisy(side=8), autoattack.Autoattack(version="rand", steps=2)
    images, labels = case(Smooth(side=8))
    with pytest.raises(UserError, match="draws none in evaluation; allowed: standard or plus"):
        run(attack, Smooth(side=8), images, labels, 0.1)
    watched = Watched(model)
    ours = run(attack, watched, images, labels, 0.2)
    assert (ours - images).abs().max() <= 0.2 + 1e-6 and (ours != images).any()
    # 2 to see the noise, 1 clean, then 20 per gradient: of the start and of each of 2 steps.
    assert watched.asked[:3] == [IMAGES] * 3 and len(set(watched.asked[3:63])) == 1
    at = module.ModelGradient(model, lambda output: output.prediction.sum(1), samples=3)
    torch.manual_seed(0)
    _, mean = at(images)
    _, single = module.ModelGradient(Smooth(side=8), at.goal)(images)
    assert torch.allclose(mean, single, atol=1e-5)


@pytest.mark.parametrize(
    ("attack", "classes", "text"),
    [
        (SMALL, 3, "targeted_dlr does not exist for 3 classes: .* fourth largest logit"),
        (SMALL, 2, "targeted_dlr does not exist for 2 classes: .* allowed: apgd"),
        (SMALL.model_copy(update={"targets": 4}), 4, "targets: found 4; allowed: 1 to 3 or all"),
        (fab.Fab(targets=3), 3, "targets: found 3; allowed: 1 to 2 or all"),
        (Apgd(objective="targeted_dlr"), 3, "needs 4 or more; allowed: cross_entropy"),
        (Apgd(objective="dlr"), 2, "needs 3 or more; allowed: cross_entropy"),
    ],
)
def test_too_few_classes_are_refused_in_words(attack, classes, text):
    model = Curved(64, classes=classes)
    images, _ = case(model)
    with pytest.raises(UserError, match=text) as error:
        run(attack, model, images, torch.zeros(IMAGES).long(), 0.1)
    assert "\n" not in str(error.value)


def test_two_classes_are_attacked_by_the_parts_that_can():
    model = Linear(torch.linspace(-1, 1, 64))
    images, labels = case(Curved(64, classes=2))
    labels = model(images).prediction.argmax(1)
    margin = model(images).prediction[:, 1].abs().detach()
    for norm, dual in (("linf", 1), ("l2", 2)):
        reach = margin / model.weight.detach().norm(
            dual
        )  # the exact distance to the boundary, clamps aside
        epsilon = float(reach.median())
        ours = run(fab.Fab(norm=norm, steps=20), model, images, labels, epsilon)
        broken = (ours != images).flatten(1).any(1)
        assert broken[reach < 0.8 * epsilon].all() and not broken[reach > epsilon].any()
        assert (base.Ball(images, epsilon, norm).lengths(ours - images) <= epsilon + 1e-6).all()


class Cusp(Smooth):
    """Finite logits, whose gradient is not."""

    def forward(self, images):
        output = super().forward(images)
        cusp = (0 * images).sqrt().flatten(1).sum(1, keepdim=True)
        return output._replace(prediction=output.prediction + cusp)


def test_what_cannot_be_attacked_is_refused_in_one_line():
    assert SMALL.refuses(YEARS).startswith("autoattack needs one class per image, and ")
    assert "several labels" in square.Square().refuses(SETS)
    shared = vit({"kind": "noisy_top_k", "k": 1, "eval_capacity_factor": 0.5, "group_size": 4})
    assert "share experts' capacity" in SMALL.does_not_apply(shared, CLASSES)
    model = Smooth(side=8)
    images, labels = case(model)
    for epsilon, norm, text in ((1.5, "linf", "0 to 1 "), (9, "l2", "0 to 8 "), (-1, "l2", "-1")):
        with pytest.raises(ValueError, match=text):
            run(SMALL.model_copy(update={"norm": norm}), model, images, labels, epsilon)
    with pytest.raises(UserError, match=r"found \(10, 1, 8, 8, 1\)"):
        run(SMALL, model, images[..., None], labels, 0.1)
    with pytest.raises(ValueError, match="CPU generator"):
        square.Square()(model, CLASSES, images, labels, 0.1)
    for settings in ({"restarts": 2}, {"norm": "l1"}, {"eps": 0}):
        with pytest.raises(ValueError):
            pgd.Pgd(**settings)
    for attack in (SMALL, fab.Fab(steps=1)):
        with pytest.raises(UserError, match="not finite"):
            run(attack, Cusp(side=8), images, labels, 0.1)


def record(logits: list, chosen: list, combine: list | None = None) -> RoutingRecord:
    """One image; the probs are a softmax of the logits, and the weights of chosen experts."""
    values, mask = torch.tensor([logits]), torch.tensor([chosen]).bool()
    probs = values.softmax(dim=-1)
    weights = probs * mask if combine is None else torch.tensor([combine])
    return RoutingRecord(values, probs, mask.float(), mask, weights)


def test_the_margin_by_hand():
    # Token 0 chose experts 0 and 1: the next exceeds the second by 1 − 2 = −1. Token 1 chose expert
    # 2 and now has expert 0 ahead by 3, which counts as the most. Token 2 chose all: 0.
    layer = record([[3.0, 2, 1], [3.0, 2, 0], [1.0, 1, 1]], [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    before = torch.tensor([[[1, 1, 0], [0, 0, 1], [1, 1, 1]]]).bool()
    expected = torch.tensor([(-1 + module.MAX_MARGIN_LOSS_PER_TOKEN) / 3])
    for layers in (0, 1, 2):
        output = ModelOutput(torch.zeros(1, 3), (layer,) * layers)
        found = module.routing_margin_loss(output, [before] * layers)
        assert torch.allclose(found, layers * expected)


def test_task_and_routing_add_up():
    model, pixels, labels = Smooth(), torch.rand(5, 1, 4, 4), torch.zeros(5, dtype=torch.long)
    pairs = []
    for name in ("task", "routing_margin", "task_and_routing"):
        goal = module.make_objective(name, 0.3, model, CLASSES, pixels, labels)
        pairs.append(module.ModelGradient(model, goal)(0.9 * pixels))
    (task, by_task), (margin, by_margin), (joint, by_joint) = pairs
    assert torch.allclose(joint, task + 0.3 * margin)
    assert torch.allclose(by_joint, by_task + 0.3 * by_margin, atol=1e-6)
    assert by_margin.any()


def test_soft_weights_by_hand():
    # The midpoint of the first and the second logit is 1: distances 1, −1, −2 at temperature 2. The
    # gates σ(1/2), σ(−1/2), σ(−1) times the probs, with the sum of the one hard weight.
    layer = record([[2.0, 0, -1]], [[1, 0, 0]])
    gates = torch.sigmoid(torch.tensor([0.5, -0.5, -1])) * layer.probs
    expected = gates * layer.combine.sum() / gates.sum()
    assert torch.allclose(soft_top_k_weights(layer, 2.0), expected)
    # Doubled weights of two chosen experts, the second over capacity: only the first and the last.
    layer = record([[2.0, 1, 0]], [[1, 1, 0]], [[1.4, 0.0, 0.0]])
    found = soft_top_k_weights(layer, 1.0)[0, 0]
    assert found[1] == 0 and found[2] > 0 and found.sum() == pytest.approx(1.4)
    # All experts, or none: as they are. A balance chose the second: it keeps the larger gate.
    for chosen in ([1, 1, 1], [0, 0, 0]):
        layer = record([[2.0, 1, 0]], [chosen])
        assert torch.allclose(soft_top_k_weights(layer, 1.0), layer.combine)
    shifted = soft_top_k_weights(record([[1.0, 0.0]], [[0, 1]]), 0.01)[0, 0]
    assert shifted[1] > 0 and shifted[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("router", [*ROUTERS, CAPPED], ids=lambda router: router["kind"])
def test_a_cold_soft_choice_is_the_hard_one(router):
    model, pixels = vit(router), images()
    hard = model(pixels).prediction
    assert torch.allclose(soften_model(model, 1e-6)(pixels).prediction, hard, atol=1e-5)
    leaf = pixels.requires_grad_()
    soft = soften_model(model, 0.1)(leaf).prediction
    (gradient,) = torch.autograd.grad(soft.sum(), leaf)
    assert gradient.isfinite().all()
    if router["kind"] == "noisy_top_k":
        assert not torch.allclose(soft, hard, atol=1e-3)


def attack_images(attack, model, pixels, labels) -> torch.Tensor:
    return attack(
        model, CLASSES, pixels, labels, EPSILON, seed_generator_per_image(0, range(len(pixels)))
    )


def test_a_surrogate_is_attacked_and_apgd_goes_on_from_there():
    model = vit(SPARSE)
    pixels = images(8)
    labels = model(pixels).prediction.argmax(dim=1)
    surrogate = Surrogate(steps=4, temperature=0.3)
    soft = attack_images(surrogate, model, pixels, labels)
    apgd = Apgd(steps=4)
    assert torch.equal(soft, attack_images(apgd, soften_model(model, 0.3), pixels, labels))
    direct = attack_images(surrogate.model_copy(update={"direct": True}), model, pixels, labels)
    losses = [CLASSES.attack_loss(model(x).prediction, labels) for x in (pixels, soft, direct)]
    assert (losses[2] >= losses[1]).all() and losses[2].mean() > losses[1].mean() > losses[0].mean()
    for moved in (soft, direct):
        assert (moved - pixels).abs().max() <= EPSILON + 1e-6


def test_every_form_is_swept():
    forms = RouterAttacks(steps=4, temperatures=(0.2, "probs"), weights=(2.0,)).parts
    soft = ["surrogate-4-0.2", "surrogate-4-probs"]
    names = [*soft, *(f"{name}-direct" for name in soft)]
    names += ["apgd-task_and_routing-2.0-4", "apgd-routing_margin-4"]
    assert [attack.name for attack in forms] == names
    for attack in forms:
        assert attack.does_not_apply(vit(None), CLASSES) == module.NO_ROUTING_TEXT
        assert attack.does_not_apply(vit(SPARSE), CLASSES) is None


class Quick(autoattack.Autoattack):
    steps: int = 6
    queries: int = 30


def test_robustbench_takes_the_entry_and_the_model(tmp_path, monkeypatch):
    data = digits(tmp_path / "data")
    experts = Mlp(number=4, hidden_ratio=1)
    moe = MoESettings(router=NoisyTopK(k=2), experts=experts, blocks="all")
    model = built(Vit(patch=4, width=8, depth=1, heads=2), moe, data, 3)
    save_model(tmp_path, model)
    images = torch.from_numpy(data.test.images[:6] / np.float32(255))
    answers = model(images).prediction.argmax(1)
    labels = np.r_[answers[:5], (answers[5:] + 1) % 10]  # the last is wrong without an attack
    data = data._replace(test=Split(images.numpy(), labels))
    monkeypatch.setattr(Prepared, "open", lambda folder: data)
    monkeypatch.setattr(robustbench, "Autoattack", Quick)
    entry = ["robustbench", str(tmp_path), "--data", "x", "--images", "6"]
    out = tmp_path / "entry.json"
    result = CliRunner().invoke(app, [*entry, "--eps", "4/255", "--out", str(out)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [written[key] for key in ("clean_acc", "eps", "dataset")] == ["83.33", "4/255", "digits"]
    assert written["architecture"] == "vit with 4 experts, 2 per token (noisy_top_k)"
    logits = LogitsModel(moecore.load_model(tmp_path)).eval()
    theirs = AutoAttack(logits, eps=4 / 255, version="custom", attacks=["apgd-ce"], seed=0)
    weaker, _ = theirs.run_standard_evaluation(images, torch.from_numpy(labels), batch_size=6)
    broken = logits(weaker).argmax(1) != torch.from_numpy(labels)
    assert 1 < broken.sum() <= 6 - 0.06 * float(written["autoattack_acc"])
    for eps, allowed in {"0/255": "a number", "8": "at most 1 (Linf)"}.items():
        refused = CliRunner().invoke(app, [*entry, "--eps", eps])
        assert refused.exit_code == 1
        assert f"--eps: found {eps}; allowed: {allowed}" in refused.output
