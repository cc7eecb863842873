"""Checks of routers, balances, experts, backbones, teachers and regularizers.

B images, T tokens per image, E experts, R rows, d width, K outputs.
"""

import copy
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from moecore.conformance import laws, own_layers
from moecore.conformance.targets import (
    NotPromised,
    draw_weights,
    has_same_state,
    is_close,
    seeded_randn,
)
from moecore.core.config import part_classes_by_kind
from moecore.nn.backbones.base_model import Backbone, BackboneModel, EncodeOptions, ImageSpec
from moecore.nn.balances.base import Balance
from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import Experts, ExpertsModule, ZeroComputation
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import (
    MoEFeedForward,
    MoESettings,
    build_moe_feed_forward,
    update_routers,
)
from moecore.nn.predict import coupled_image_count
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.testing.check_helpers import (
    EXPERTS,
    IMAGE,
    assert_refused,
    assert_that,
    check_build_on_meta,
    instantiate_settings,
    name_part_in_errors,
    small_objective_inputs,
    small_vit,
)
from moecore.training.regularizers.base import Regularizer
from moecore.training.teachers.base import Teacher

MOE = MoESettings(router=NoisyTopK(), experts=Mlp(number=EXPERTS, hidden_ratio=1.0), blocks="all")
ROWS = 5  # per expert, except the last one, which has none


@name_part_in_errors
def check_backbone(backbone: Backbone | type[Backbone], image: ImageSpec = IMAGE) -> None:
    """Check that a backbone keeps the promises of backbones, dense and with four experts.

    The model has the grid and the stages of its settings. Outputs are (B, …, K), fp32 and finite;
    an MoE layer's record is (B, T, E), the features of a block are (B, T, width). A gradient
    reaches images and weights. Evaluation draws no random number and does not depend on the batch.
    The same seed builds the same model, and models with the same state_dict compute the same. Bytes
    and images with a wrong number of channels are a UserError in one line.

    Args:
        backbone: settings, or their class, whose defaults are checked.
        image: small images, volumes or texts for which the backbone is built.

    Raises:
        AssertionError: a promise is broken; one line with the backbone's name.
    """
    settings = instantiate_settings(backbone)
    check_build_on_meta(settings, lambda: settings.build(image, MOE))
    assert_that(settings, sum(settings.stages) == settings.depth, "depth is the sum of stages")
    for moe in (None, MOE):
        model, twin = _build(settings, image, moe), _build(settings, image, moe)
        same = has_same_state(model, twin.state_dict())
        assert_that(settings, same, "the same seed builds the same model")
        fits = model.layout_of(0).grid == settings.grid(image)
        assert_that(settings, fits, "grid() is the model's grid")
        draw_weights(model, std=1.2 / model.width_of(0) ** 0.5)  # so that no layer explodes
        _check_model(settings, model)
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        images = make_images(image)
        same = torch.equal(twin(images).prediction, model(images).prediction)
        assert_that(settings, same, "a model with the same state_dict computes the same")


@name_part_in_errors
def check_teacher(teacher: Teacher | type[Teacher], image: ImageSpec = IMAGE) -> None:
    """Check that a teacher keeps the promises of teachers.

    Its model takes images like ``image`` and keeps the promises of ``check_backbone``. A teacher
    that comes trained is the same for every seed.

    Args:
        teacher: settings, or their class, whose defaults are checked.
        image: the images for which the teacher is built.

    Raises:
        AssertionError: a promise is broken; one line with the teacher's name.
        UserError: the teacher's ``check_name`` refuses its name.
    """
    settings = instantiate_settings(teacher)
    settings.check_name(image)
    model, other = (_build(settings, image, seed=seed) for seed in (0, 1))
    fits = (model.image.shape, model.image.channels) == (image.shape, image.channels)
    assert_that(settings, fits, "its model takes the images that it is built for")
    same = settings.training is not None or has_same_state(model, other.state_dict())
    assert_that(settings, same, "it comes trained, the same for every seed")
    _check_model(settings, model)


def make_images(image: ImageSpec) -> Tensor:
    """Return three random inputs (3, C, *shape): images or volumes in [0, 1], or int64 words."""
    shape = (3, image.stored_channels, *image.shape)
    if len(image.shape) == 1:
        return torch.arange(prod(shape)).view(shape) * 7 % image.outputs
    return seeded_randn(*shape).sigmoid()


def _build(part: Any, image: ImageSpec, *moe: MoESettings | None, seed: int = 0) -> BackboneModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return part.build(image, *moe).eval()


def _check_model(part: Any, model: BackboneModel) -> None:
    images = make_images(model.image)
    before = torch.get_rng_state()
    output, repeated = model(images), model(images)
    assert_that(part, torch.equal(before, torch.get_rng_state()), "evaluation draws no number")
    prediction = output.prediction
    assert_that(part, prediction.isfinite().all(), "outputs are finite")
    same = torch.equal(repeated.prediction, prediction)
    assert_that(part, same, "evaluation gives the same twice")
    # Models of captions have one more output, the bias.
    fits = len(prediction) == len(images) and prediction.shape[-1] >= model.image.outputs
    assert_that(part, fits and prediction.dtype == torch.float32, "outputs are (B, …, K), fp32")
    alone = model(images[:1]).prediction
    promise = "an image has the same outputs in any batch"
    assert_that(part, is_close(alone, prediction[:1]), promise)
    layers = [(len(images), each.special + prod(each.grid), EXPERTS) for each in model.layouts]
    shapes = [record.probs.shape for record in output.routing]
    assert_that(part, shapes == layers, "an MoE layer's record is (B, T, E), by its layout")
    _check_features(part, model, images)
    _check_gradients(part, model, images)
    if images.is_floating_point():
        wrong = {"bytes": (255 * images).byte(), "channels twice": torch.cat([images] * 2, dim=1)}
        for what, inputs in wrong.items():
            assert_refused(part, partial(model, inputs), f"{what}: a UserError in one line")


def _check_features(part: Any, model: BackboneModel, images: Tensor) -> None:
    blocks = tuple(range(model.depth))
    layouts = [model.layout_of(block) for block in blocks]
    expected = [
        (len(images), layout.special + prod(layout.grid), model.width_of(block))
        for block, layout in enumerate(layouts)
    ]
    for at in ("mlp_input", "block_out"):
        features = model.encode(images, EncodeOptions(at, blocks)).features
        shapes = [tuple(tensor.shape) for tensor in features]
        assert_that(part, shapes == expected, f"features at {at} are (B, T, width) of their block")


def _check_gradients(part: Any, model: BackboneModel, images: Tensor) -> None:
    leaves: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
    if images.is_floating_point():
        images = images.clone().requires_grad_()
        leaves.append(images)
    loss = model(images).prediction.square().mean()
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    assert_that(part, finite, "its gradients are finite")
    assert_that(part, gradients[0].any(), "a gradient reaches its first weight")
    assert_that(part, gradients[-1].any(), "a gradient reaches the images")


IMAGE_WITH_TRUTH = IMAGE.model_copy(update={"truth": EXPERTS})  # with a channel of true experts
# words of ``needs`` that a step of ``small_vit`` meets
PROVIDED = frozenset({"routing", "load", "basis", "orthonormal", "guidance", "truth", "two_views"})
ZERO_COMPUTATION = Mlp(number=EXPERTS, zero_computation=ZeroComputation())


def find_needed_moe_settings(needs: frozenset[str]) -> MoESettings | None:
    """Return MoE settings that meet a regularizer's ``needs``; None if the small ViT meets them."""
    for part in part_classes_by_kind(Router).values() if needs - PROVIDED else ():
        with suppress(ValidationError):  # a router with a required setting
            router = part.model_validate({"kind": part.class_kind()})
            for experts in (Mlp(number=EXPERTS), ZERO_COMPUTATION):
                if needs - PROVIDED <= router.provides | experts.provides:
                    return MoESettings(router=router, experts=experts, blocks="all")
    return None


@name_part_in_errors
def check_regularizer(regularizer: Regularizer | type[Regularizer]) -> None:
    """Check that a regularizer keeps the promises of regularizers.

    Its term is a finite fp32 scalar, not multiplied by ``weight``, and the same twice. It draws no
    random number and changes nothing, and a gradient reaches the model or the teacher's routing.
    ``needs`` has only known words, and a missing need is a UserError in one line.

    Args:
        regularizer: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the regularizer's name.
    """
    settings = instantiate_settings(regularizer)
    moe = find_needed_moe_settings(settings.needs)
    provided = moe is not None or settings.needs <= PROVIDED
    allowed = f"{', '.join(sorted(PROVIDED))}, and what a router or experts provide"
    assert_that(settings, provided, f"needs has words among {allowed}")
    model = small_vit(IMAGE_WITH_TRUTH, moe=moe)
    step = small_objective_inputs(model)
    before = torch.get_rng_state()
    term = settings(step)
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "it draws no number")
    scalar = term.ndim == 0 and term.dtype == torch.float32 and bool(term.isfinite())
    assert_that(settings, scalar, "it gives a finite fp32 scalar")
    assert_that(settings, torch.equal(term, settings(step)), "it gives the same twice")
    heavier = settings.model_copy(update={"weight": 3 * settings.weight + 1})
    promise = "its term is not multiplied by weight: the objective does that"
    assert_that(settings, torch.equal(term, heavier(step)), promise)
    assert step.guidance is not None
    leaves = [*model.parameters(), *step.guidance.probs]
    gradients = torch.autograd.grad(term, leaves, materialize_grads=True)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    assert_that(settings, finite, "its gradients are finite")
    reached = any(gradient.any() for gradient in gradients)
    assert_that(settings, reached, "a gradient reaches the model or the teacher's routing")
    dense = step._replace(output=step.output._replace(routing=()), model=torch.nn.Linear(1, 1))
    without = {
        "routing": dense,
        "guidance": step._replace(guidance=None),
        "truth": step._replace(model=small_vit()),
        "two_views": step._replace(batch=step.batch._replace(views=1)),
    }
    for need, incomplete_step in without.items():
        if need in settings.needs:
            promise = f"without {need} it raises a UserError in one line"
            assert_refused(settings, partial(settings, incomplete_step), promise)


@name_part_in_errors
def check_router(router: Router | type[Router], experts: Experts = own_layers.EXPERTS) -> None:
    """Check that a router keeps the promises of routers.

    The record has the right shapes, dtypes and sums, also under autocast. The layer is the sum of
    the experts weighted by ``combine``, in outputs and gradients, also if k is the number of
    experts. A gradient reaches the router. Evaluation draws no random number and does not depend on
    the batch. A resumed training continues with the same bits. A router that passes
    ``check_causal`` never uses later tokens (with ``looks_ahead_in_training``: in evaluation).

    Args:
        router: settings, or their class, whose defaults are checked.
        experts: settings of the layer's experts.

    Raises:
        AssertionError: a promise is broken; one line with the router's name.
    """
    settings = instantiate_settings(router)
    check_build_on_meta(
        settings, lambda: build_moe_feed_forward(settings, experts, own_layers.WIDTH)
    )
    _check_record(settings, own_layers.build_drawn_layer(settings, experts))
    target = own_layers.describe_own_layer(settings, experts)
    checks = [(law, target) for law in laws.LAWS.values() if law.ranks == 1]
    if hasattr(settings, "k"):
        full = own_layers.describe_own_layer(settings.with_k(experts.number), experts)
        checks.append((laws.LAWS["sum weighted experts"], full))
    for law, target in checks:
        with suppress(NotPromised):
            try:
                laws.check_law(law, target)
            except AssertionError as error:
                raise AssertionError(f"{type(settings).__name__}: {error}") from error


@name_part_in_errors
def check_balance(balance: Balance | type[Balance]) -> None:
    """Check that a balance keeps the promises of balances.

    A balance evens the load of experts without a loss. A router with the balance passes
    ``check_router``, and evaluation does not change its state.

    Args:
        balance: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the name of the balance or the router.
    """
    settings = NoisyTopK(score="sigmoid", balance=instantiate_settings(balance))
    check_router(settings)
    layer = own_layers.build_drawn_layer(settings).eval()
    before = copy.deepcopy(layer.state_dict())
    update_routers(layer, layer(seeded_randn(3, own_layers.TOKENS, own_layers.WIDTH))[1])
    assert_that(settings.balance, has_same_state(layer, before), "evaluation teaches it nothing")


def _check_record(router: Any, layer: MoEFeedForward) -> None:
    tokens = seeded_randn(3 * coupled_image_count(layer), own_layers.TOKENS, own_layers.WIDTH)
    context = own_layers.derive_context(router, layer, tokens)
    for training in (True, False):
        output, (record,) = layer.train(training)(tokens, context)
        shape = (*tokens.shape[:2], own_layers.count_candidate_experts(layer))
        assert_that(router, output.shape == tokens.shape, "tokens keep their shape")
        if record.penalty is not None:
            is_right = training and record.penalty.shape == tokens.shape[:2]
            promise = "a penalty has the shape (B, T), and is of training alone"
            assert_that(router, is_right, promise)
        for name, field in zip(record._fields, record[:-1], strict=False):
            assert_that(router, field.shape == shape, f"{name} has the shape (B, T, E)")
            assert_that(router, field.isfinite().all(), f"{name} is finite")
            dtype = torch.bool if name == "chosen" else torch.float32
            assert_that(router, field.dtype == dtype, f"{name} is {dtype}")
        sums = record.probs.sum(dim=-1)
        assert_that(router, is_close(sums, torch.ones_like(sums)), "probs of a token sum to 1")
        assert_that(router, (record.probs >= 0).all(), "probs are not negative")
        inside = (record.load >= 0) & (record.load <= 1)
        assert_that(router, inside.all(), "load lies between 0 and 1")
        unchosen = record.combine[~record.chosen].any()
        assert_that(router, not unchosen, "combine is 0 where an expert is not chosen")


@name_part_in_errors
def check_experts(experts: Experts | type[Experts]) -> None:
    """Check that experts keep the promises of experts.

    An output row depends only on its input row and its expert. An expert with rows has gradients,
    an expert without rows has zeros. Evaluation draws no random number, the state_dict is the whole
    state, and bases that the experts give to the router are (E, d, r).

    Args:
        experts: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the experts' name.
    """
    settings = instantiate_settings(experts)
    check_build_on_meta(settings, lambda: settings.build(own_layers.WIDTH))
    module = settings.build(own_layers.WIDTH)
    draw_weights(module)
    number = settings.networks
    for name, weight in module.named_parameters():
        assert_that(settings, weight.shape[:1] == (number,), f"{name} has a row per expert, (E, …)")
    values = seeded_randn((number - 1) * ROWS, own_layers.WIDTH)
    ends = ROWS * torch.arange(1, number + 1, dtype=torch.int32).clamp(max=number - 1)
    _check_rows(settings, module.eval(), values, ends)
    _check_expert_gradients(settings, module, Rows(values, ends))
    resumed = settings.build(own_layers.WIDTH).eval()
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    same = torch.equal(resumed(Rows(values, ends)), module(Rows(values, ends)))
    assert_that(settings, same, "a module with the same state_dict computes the same")
    basis = module.lent_basis()
    provides = "basis" in settings.provides
    assert_that(settings, provides == (basis is not None), "a basis is lent where provides says so")
    if basis is not None:
        fits = basis.ndim == 3 and basis.shape[:2] == (number, own_layers.WIDTH)
        assert_that(settings, fits, "a lent basis is (E, d, r)")


def _check_rows(experts: Any, module: ExpertsModule, values: Tensor, ends: Tensor) -> None:
    before = torch.get_rng_state()
    answers = module(Rows(values, ends))
    assert_that(experts, torch.equal(before, torch.get_rng_state()), "evaluation draws no number")
    assert_that(experts, answers.shape == values.shape, "rows (R, d) give rows (R, d)")
    empty = module(Rows(values[:0], 0 * ends))
    assert_that(experts, empty.shape == (0, own_layers.WIDTH), "no rows give none")
    for place in (0, len(values) - 1):
        ends_of_row = (torch.arange(len(ends)) >= place // ROWS).int()
        alone = module(Rows(values[place : place + 1], ends_of_row))
        assert_that(experts, is_close(alone[0], answers[place]), "a row depends on no other row")
    other = module(Rows(values[:1], (torch.arange(len(ends)) >= 1).int()))
    differ = not is_close(other[0], answers[0])
    assert_that(experts, differ, "experts differ where their weights do")


def _check_expert_gradients(experts: Any, module: ExpertsModule, rows: Rows) -> None:
    leaf = rows.values.clone().requires_grad_()
    loss = module(rows._replace(values=leaf)).square().sum()
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, [leaf, *parameters.values()], allow_unused=True)
    assert_that(experts, gradients[0] is not None and gradients[0].any(), "rows have a gradient")
    for name, gradient in zip(parameters, gradients[1:], strict=True):
        assert_that(experts, gradient is not None, f"{name} has a gradient")
        assert_that(experts, gradient.isfinite().all(), f"the gradient of {name} is finite")
        if len(gradient) == experts.networks:
            assert_that(experts, gradient[0].any(), f"{name} of an expert with rows has a gradient")
            promise = f"the gradient of {name} is 0 for an expert without rows"
            assert_that(experts, not gradient[-1].any(), promise)
