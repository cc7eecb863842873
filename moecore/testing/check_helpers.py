"""Shared by all checks: one-line failures, a small model, and small data."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeVar, get_origin

import numpy as np
import torch

from moecore.conformance.targets import draw_weights, seeded_randn
from moecore.core import files, source_layout
from moecore.core.routing_records import Batch, Guidance, ObjectiveInputs
from moecore.data.prepared import Prepared, Split
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.eigen import Eigen
from moecore.nn.layers.moe import MoESettings
from moecore.nn.predict import meta_device_context
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.tasks.classification import Classification

P = ParamSpec("P")
R = TypeVar("R")


def name_part_in_errors(check: Callable[P, R]) -> Callable[P, R]:
    """Decorate a check so that a part's error becomes a one-line AssertionError with its name."""

    @wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return check(*args, **kwargs)
        except (AssertionError, files.UserError):
            raise
        except Exception as error:
            part = [*args, *kwargs.values()][0]
            name = getattr(part, "__name__", type(part).__name__)
            text = source_layout.format_error_with_line(error)
            raise AssertionError(f"{name}: {text}") from error

    return checked


def instantiate_settings(part: Any) -> Any:
    """Return the default settings of a class; return an instance of settings unchanged.

    Raises AssertionError if a setting has no default, or a declared class attribute has no value.
    """
    owner = part if inspect.isclass(part) else type(part)
    for base in owner.__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if get_origin(annotation) is ClassVar and not hasattr(owner, name):
                hint = f"set the class attribute {name}, which {base.__name__} documents"
                raise AssertionError(f"{owner.__name__}: {hint} (docs/api.md)")
    if owner is not part:
        return part
    fields = owner.model_fields.items()
    if required := [name for name, field in fields if field.is_required()]:
        text = f"{', '.join(required)} without default: pass settings, not the class"
        raise AssertionError(f"{owner.__name__}: {text}")
    return part()


def check_build_on_meta(part: Any, build: Callable[[], Any]) -> None:
    """Raise AssertionError if ``build`` fails on the meta device, which ``moecore check`` uses."""
    try:
        with meta_device_context():
            build()
    except RuntimeError as error:
        promise = "it builds on the meta device, where tensors have shapes and no values"
        text = source_layout.format_error_with_line(error)
        raise AssertionError(f"{type(part).__name__}: {promise}: {text}") from error


def assert_that(part: Any, is_true: Any, promise: str) -> None:
    if not is_true:
        raise AssertionError(f"{type(part).__name__}: {promise}")


def assert_refused(part: Any, call: Callable[[], Any], promise: str, start: str = "") -> None:
    """Raise AssertionError unless ``call`` raises a one-line UserError beginning with ``start``."""
    try:
        call()
    except files.UserError as error:
        assert_that(part, str(error).startswith(start) and "\n" not in str(error), promise)
    else:
        assert_that(part, False, promise)


SIDE = 8  # pixels
EXPERTS = 4
CLASSES = Classification(classes=("a", "b", "c", "d"))
IMAGE = ImageSpec(channels=1, size=SIDE, mean=(0.5,), std=(0.3,), task=CLASSES)


def small_vit(image: ImageSpec = IMAGE, moe: MoESettings | None = None) -> PatchTransformer:
    """Return a ViT with two MoE blocks, in evaluation mode; by default with ``Eigen`` experts."""
    if moe is None:
        router = NoisyTopK(start="orthonormal")
        moe = MoESettings(router=router, experts=Eigen(number=EXPERTS), blocks="all")
    with torch.random.fork_rng(devices=[]):
        model = Vit(patch=4, width=16, depth=2, heads=2).build(image, moe).eval()
    draw_weights(model, std=0.3)
    return model


def small_objective_inputs(model: PatchTransformer, progress: float = 0.0) -> ObjectiveInputs:
    """Return inputs of a loss: a batch of three images in two views, and a teacher's routing."""
    images = seeded_randn(6, model.image.stored_channels, SIDE, SIDE).sigmoid()
    labels = torch.arange(6) % len(CLASSES.classes)
    tokens = 1 + (SIDE // 4) ** 2
    experts = model.experts_and_router.experts.choices
    batch = Batch(
        images,
        labels,
        torch.eye(3).expand(6, 3, 3),
        views=2,
        belongs=torch.arange(6 * tokens).view(6, tokens) % experts,
    )
    probs = tuple(
        (2 * seeded_randn(6, tokens, experts, seed=seed)).softmax(dim=-1).requires_grad_()
        for seed in range(2)
    )
    guidance = Guidance(seeded_randn(6, len(CLASSES.classes)), probs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.train()(images, guidance, progress)
    return ObjectiveInputs(batch, output, model.eval(), guidance, progress)


def small_data() -> Prepared:
    """Return prepared data in memory: 24 noise images of 8 × 8 pixels per split, four classes."""
    card = {"name": "noise", "task": CLASSES.model_dump(mode="json")}
    card |= {"channels": 1, "size": SIDE, "mean": IMAGE.mean, "std": IMAGE.std}
    splits = []
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (24, 1, SIDE, SIDE), dtype=np.uint8)
        splits.append(Split(pixels, np.arange(24) % len(CLASSES.classes)))
    return Prepared(card, splits[0], splits[1], splits[2])
