"""What every backbone, teacher and regularizer promises, as functions of one line in a test.

B images, T tokens, E experts, K outputs.
"""

import copy
from contextlib import suppress
from math import prod
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from moecore.core.config import part_classes_by_kind
from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs
from moecore.nn.backbones.base_model import Backbone, BackboneModel, EncodeOptions, ImageSpec
from moecore.nn.experts.base import ZeroComputation
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.testing.check_helpers import (
    EXPERTS,
    IMAGE,
    assert_that,
    draw_weights,
    is_close,
    seeded_randn,
    settings_of,
    small_objective_inputs,
    small_vit,
)
from moecore.training.regularizers.base import Regularizer
from moecore.training.teachers.base import Teacher

MOE = MoESettings(router=NoisyTopK(), experts=Mlp(number=EXPERTS, hidden_ratio=1.0), blocks="all")


def check_backbone(backbone: Backbone | type[Backbone], image: ImageSpec = IMAGE) -> None:
    """Raise AssertionError, in one line, where a backbone breaks a promise of backbones.

    backbone: settings, or their class, whose defaults are then checked; image: small images,
    volumes or text that it is built for, dense and with four experts in every block. It has the
    grid and the stages that it says. Outputs are (B, …, K), fp32 and finite; an MoE layer's record
    is (B, T, E), the features of a block (B, T, width). A gradient reaches images and weights.
    Evaluation draws nothing and does not depend on the batch. The same seed builds the same, and a
    model with the same state_dict computes the same. Bytes, and images of other channels, are a
    UserError in one line.
    """
    settings = settings_of(backbone)
    assert_that(settings, sum(settings.stages) == settings.depth, "its blocks are those of stages")
    for moe in (None, MOE):
        model, twin = _build(settings, image, moe), _build(settings, image, moe)
        ours, theirs = model.state_dict(), twin.state_dict()
        same = all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert_that(settings, same, "the same seed builds the same model")
        assert_that(
            settings, model.layout_of(0).grid == settings.grid(image), "its grid is as it says"
        )
        draw_weights(model, std=1.2 / model.width_of(0) ** 0.5)  # so that no layer explodes
        _check_model(settings, model)
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        images = make_images(image)
        same = torch.equal(twin(images).prediction, model(images).prediction)
        assert_that(settings, same, "a model with the same state_dict computes the same")


def check_teacher(teacher: Teacher | type[Teacher], image: ImageSpec = IMAGE) -> None:
    """Raise AssertionError, in one line, where a teacher breaks a promise of teachers.

    teacher: settings, or their class, whose defaults are then checked; image: the images that it
    is built for. Its name is in order where it can be built. Its model takes such images, and does
    what ``check_backbone`` asks of a model; one that comes trained is the same for every seed.
    """
    settings = settings_of(teacher)
    settings.check_name(image)
    model, other = (_build(settings, image, seed=seed) for seed in (0, 1))
    fits = (model.image.shape, model.image.channels) == (image.shape, image.channels)
    assert_that(settings, fits, "its model takes the images that it is built for")
    if settings.training is None:
        ours, theirs = model.state_dict(), other.state_dict()
        same = all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert_that(settings, same, "it comes trained, alike for every seed")
    _check_model(settings, model)


def make_images(image: ImageSpec) -> Tensor:
    """Return three inputs (B, C, *shape): images or volumes in [0, 1], or int64 words of a text."""
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
    output, again = model(images), model(images)
    assert_that(part, torch.equal(before, torch.get_rng_state()), "evaluation draws no number")
    prediction = output.prediction
    assert_that(part, prediction.isfinite().all(), "outputs are finite")
    assert_that(part, torch.equal(again.prediction, prediction), "evaluation gives the same twice")
    # of captions one more: the bias
    fits = len(prediction) == len(images) and prediction.shape[-1] >= model.image.outputs
    assert_that(part, fits and prediction.dtype == torch.float32, "outputs are (B, …, K), fp32")
    alone = model(images[:1]).prediction
    assert_that(part, is_close(alone, prediction[:1]), "an image is told alike in any batch")
    layers = [(len(images), one.special + prod(one.grid), EXPERTS) for one in model.layouts]
    shapes = [record.probs.shape for record in output.routing]
    assert_that(part, shapes == layers, "an MoE layer's record is (B, T, E), by its layout")
    _check_features(part, model, images)
    _check_gradients(part, model, images)
    if images.is_floating_point():
        wrong = {"bytes": (255 * images).byte(), "channels twice": torch.cat([images] * 2, dim=1)}
        for what, inputs in wrong.items():
            _check_refusal(part, model, what, inputs)


def _check_refusal(part: Any, model: BackboneModel, what: str, images: Tensor) -> None:
    promise = f"{what}: a UserError in one line"
    try:
        model(images)
    except UserError as error:
        assert_that(part, "\n" not in str(error), promise)
    else:
        assert_that(part, False, promise)


def _check_features(part: Any, model: BackboneModel, images: Tensor) -> None:
    blocks = tuple(range(model.depth))
    places = [model.layout_of(block) for block in blocks]
    expected = [
        (len(images), one.special + prod(one.grid), model.width_of(block))
        for block, one in enumerate(places)
    ]
    for at in ("mlp_input", "block_out"):
        features = model.encode(images, EncodeOptions(at, blocks)).features
        shapes = [tuple(one.shape) for one in features]
        assert_that(part, shapes == expected, f"features at {at} are (B, T, width) of their block")


def _check_gradients(part: Any, model: BackboneModel, images: Tensor) -> None:
    leaves: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
    if images.is_floating_point():
        images = images.clone().requires_grad_()
        leaves.append(images)
    loss = model(images).prediction.square().mean()
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    assert_that(part, finite, "its gradients are finite")
    assert_that(part, gradients[0].any(), "a gradient reaches its first weight")
    assert_that(part, gradients[-1].any(), "a gradient reaches the images")


SAID = IMAGE.model_copy(update={"truth": EXPERTS})  # with a channel that says the truth
# what a step of ``small_vit`` has
GIVEN = frozenset({"routing", "load", "basis", "orthonormal", "guidance", "truth", "two_views"})
SPECIAL = Mlp(number=EXPERTS, zero_computation=ZeroComputation())


def find_providing_layers(needs: frozenset[str]) -> MoESettings | None:
    """Return layers with a router, as by default, or experts that provide what is needed; None
    where a step of ``small_vit`` has it, or nothing provides it.
    """
    for part in part_classes_by_kind(Router).values() if needs - GIVEN else ():
        with suppress(ValidationError):  # a router that lacks a setting
            router = part.model_validate({"kind": part.class_kind()})
            for experts in (Mlp(number=EXPERTS), SPECIAL):
                if needs - GIVEN <= router.provides | experts.provides:
                    return MoESettings(router=router, experts=experts, blocks="all")
    return None


def check_regularizer(regularizer: Regularizer | type[Regularizer]) -> None:
    """Raise AssertionError, in one line, where a regularizer breaks a promise of regularizers.

    regularizer: settings, or their class, whose defaults are then checked. It gives a finite fp32
    scalar, unweighted, as the objective weighs it; the same twice, drawing nothing and changing
    nothing; a gradient reaches the model or the teacher's routing. ``needs`` has known words only,
    and without what it needs it is a UserError in one line.
    """
    settings = settings_of(regularizer)
    moe = find_providing_layers(settings.needs)
    provided = moe is not None or settings.needs <= GIVEN
    words = f"{', '.join(sorted(GIVEN))}, and what a router or experts provide"
    assert_that(settings, provided, f"needs has words among {words}")
    model = small_vit(SAID, moe=moe)
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
    _check_refusals(settings, step)


def _check_refusals(regularizer: Any, step: ObjectiveInputs) -> None:
    dense = step._replace(output=step.output._replace(routing=()), model=torch.nn.Linear(1, 1))
    without = {
        "routing": dense,
        "guidance": step._replace(guidance=None),
        "truth": step._replace(model=small_vit()),
        "two_views": step._replace(batch=step.batch._replace(views=1)),
    }
    for need, lacking in without.items():
        if need not in regularizer.needs:
            continue
        try:
            regularizer(lacking)
        except UserError as error:
            assert_that(regularizer, "\n" not in str(error), f"without {need} it raises one line")
        else:
            assert_that(regularizer, False, f"without {need} it raises a UserError")
