"""The same weights under another router setting at test time: sweeps over k and over the threshold.

ERMoE, figures S3 and S5. N images.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.attack_setup import Target
from moecore.attacks.base import Attack
from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.image_noise import standard_normal_noise
from moecore.measure.routing_metrics.layer_metrics import expert_counts, load_cv2, mean_over_layers
from moecore.measure.routing_metrics.layer_use import (
    eligible_tail_mass,
    fallback_rate,
    tail_of_probs,
)
from moecore.measure.routing_metrics.two_view_augmentations import (
    TwoViewAugmentation,
    draw_two_views,
)
from moecore.nn.backbones.base_model import BackboneModel, Model
from moecore.nn.correspondence import original_patches_of_views
from moecore.nn.predict import model_device, predict_in_batches
from moecore.nn.routers.base import Router
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.tasks.base import Task
from moecore.training.guide import GuidedModel

Kind = Literal["clean", "noise", "attack", "augmentation"]


class ChangedImages(NamedTuple):
    """N images that were changed."""

    kind: Kind
    label: str
    pixels: Tensor  # fp32 in [0, 1]
    # (N, P) int64: the clean image's patch that each patch shows, −1 for none; None: the same
    origins: Tensor | None = None


def noise_variants(
    clean: Tensor, places: Sequence[int], sigmas: Sequence[float], seed: int, channels: int
) -> Iterator[ChangedImages]:
    """Gaussian noise along one direction an image, as the measurement ``stability`` draws it.

    The background of a volume, which is 0, stays as it is, and so do channels behind the first
    ``channels``, which no model sees: they say the truth.
    """
    drawn = standard_normal_noise(np.array(places), tuple(clean.shape[1:]), seed)
    drawn[:, channels:] = 0
    if clean.ndim == 5:
        drawn = drawn * (clean != 0)
    for sigma in sigmas:
        yield ChangedImages("noise", f"σ = {sigma:g}", (clean + sigma * drawn).clamp(0, 1))


def attack_variants(
    target: Target, attack: Attack, epsilons: Sequence[float]
) -> Iterator[ChangedImages]:
    """Every radius by itself, from the clean image."""
    for epsilon in epsilons:
        label = f"ε = {255 * epsilon:.3g}/255"
        yield ChangedImages("attack", label, target.attacked(attack, epsilon))


def augmentation_variants(
    images: np.ndarray, augmentations: Sequence[TwoViewAugmentation], layout: TokenLayout, seed: int
) -> Iterator[ChangedImages]:
    """One random view of each image, kind by kind; images: uint8, volumes float16.

    Drawn from (seed, name), so every method sees the same.
    """
    number = len(images)
    for asked in augmentations:
        views = draw_two_views(images, asked, seed, *asked.name.encode())
        index, has_origin = original_patches_of_views(views.affines[:number], layout)
        shown = torch.where(has_origin, index, -1)
        patches = torch.arange(shown.shape[1])
        moved = None if bool((shown == patches).all()) else shown
        yield ChangedImages("augmentation", asked.name, views.images[:number], moved)


TRAINED_THRESHOLD = 0.5  # T of figure S3, where its curve is said to bend
Experts = tuple[Annotated[int, Field(ge=1)], ...]  # numbers of experts per token


class SweepSettings(Config):
    """Which settings of the router are tried on the trained weights.

    Nothing is chosen by them: they only show what was at stake.
    """

    k: Experts = Field(
        (1, 2, 3, 4, 6), description="Experts per token; those above the number are left out"
    )
    threshold: tuple[Annotated[float, Field(ge=-1, le=1)], ...] = Field(
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        description="Thresholds of routers that have one (a cosine); the others have no such sweep",
    )
    images: int = Field(300, ge=1, description="Of the images that the routing is measured on")


Numbers = dict[str, float]  # what a model has under one setting, by name


class SweepImages(NamedTuple):
    """What a setting is tried on."""

    images: np.ndarray  # as ``predict_in_batches`` takes them
    labels: Tensor
    task: Task


def copy_with_router(model: Model, router: Router) -> Model:
    """A new model of the same weights, device and mode whose MoE layers follow ``router``.

    The given model and the global RNG stay as they are.  model: of a backbone, with MoE layers, or
    Guided: the new one then shares its guide.  router: of the model's own kind.
    """
    if isinstance(model, GuidedModel):
        guided = GuidedModel(_replace_routers(model.model, router), model.guide)
        guided.training = model.training  # not train(): that would reach the guide
        return guided
    return _replace_routers(model, router)


def _replace_routers(model: Model, router: Router) -> BackboneModel:
    moe = model.experts_and_router.model_copy(update={"router": router})
    with torch.random.fork_rng(devices=[]):  # drawn and then overwritten
        other = model.config.build(model.image, moe)
    other.load_state_dict(model.state_dict())
    return other.to(model_device(model)).train(model.training)


def copy_with_k(model: Model, k: int) -> Model | None:
    """``copy_with_router`` with another k; None without a k or with too few experts (or too many
    shared ones for it).

    model: with MoE layers.
    """
    moe = model.experts_and_router
    if not hasattr(moe.router, "k") or not 1 <= moe.experts.scale_k(k) <= moe.experts.choices:
        return None
    return copy_with_router(model, moe.router.with_k(k))


def sweep_k(model: Model, sample: SweepImages, numbers: Experts, batch: int) -> dict[int, Numbers]:
    """Return each k ≤ E of ``numbers`` → what ``setting_numbers`` has; {} for a router without k.

    Of split experts the keys are how many pieces a token chooses.
    """
    outcomes = {}
    for k in numbers:
        other = copy_with_k(model, k)
        if other is not None:
            pieces = other.experts_and_router.experts.scale_k(k)
            outcomes[pieces] = setting_numbers(other, pieces, sample, batch)
    return outcomes


def sweep_threshold(
    model: Model, sample: SweepImages, thresholds: tuple[float, ...], batch: int
) -> dict[float, Numbers]:
    """Return the same of each threshold; {} for a router without a threshold."""
    router = model.experts_and_router.router
    if not isinstance(router, Eigenbasis):
        return {}
    chosen = model.experts_and_router.experts.scale_k(router.k)
    outcomes = {}
    for threshold in thresholds:
        changed = router.model_copy(update={"threshold": threshold})
        other = copy_with_router(model, changed)
        outcomes[threshold] = setting_numbers(other, chosen, sample, batch)
    return outcomes


def score_threshold(router: Any) -> float | None:
    """Return what the logit of a chosen expert exceeds; None for routers without such a threshold.

    That of top_p is a sum of probabilities.
    """
    return router.threshold if router.has_score_threshold else None


def run_sweeps(
    model: Model, sample: SweepImages, settings: SweepSettings, batch: int
) -> dict[str, Mapping[Any, Numbers]]:
    """Both sweeps of a model with MoE layers, by the name of what is set."""
    return {
        "k": sweep_k(model, sample, settings.k, batch),
        "threshold": sweep_threshold(model, sample, settings.threshold, batch),
    }


def setting_numbers(model: Model, k: int, sample: SweepImages, batch: int) -> Numbers:
    """Return the task's score, and the means of ``routing_means_over_layers``."""
    prediction, records = predict_in_batches(model, sample.images, batch)
    threshold = score_threshold(model.experts_and_router.router)
    score = float(sample.task.scores(prediction, sample.labels).double().numpy().mean())
    return {"score": score, **routing_means_over_layers(records, k, threshold)}


def routing_means_over_layers(
    records: Sequence[RoutingRecord], k: int, threshold: float | None
) -> Numbers:
    """Means over the MoE layers of what all of them have.

    tail_mass: eq. 12 with a threshold, else the share of the probs outside the best k.  fallback:
    with a threshold only.  Where no token chose an expert a layer has no load_cv2, where none has
    an eligible expert no tail_mass.
    """
    counts = [expert_counts(record.chosen) for record in records]
    means = {"load_cv2": [load_cv2(one) if one.any() else None for one in counts]}
    if threshold is None:
        tails = [tail_of_probs(record.probs, k) for record in records]
    else:
        tails = [eligible_tail_mass(record.logits, threshold, k) for record in records]
        means["fallback"] = [fallback_rate(record.logits, threshold) for record in records]
    averaged = {name: mean_over_layers(one) for name, one in {**means, "tail_mass": tails}.items()}
    return {name: mean for name, mean in averaged.items() if mean is not None}


def fallback_slopes(fallback: Mapping[float, float]) -> Numbers:
    """Return how fast the fallback rises on either side of TRAINED_THRESHOLD (figure S3).

    fallback: threshold → share; a side without another threshold has no slope.
    """
    slopes: Numbers = {}
    for side, end in (("below", min), ("above", max)):
        other = end(fallback, default=TRAINED_THRESHOLD)
        if TRAINED_THRESHOLD in fallback and other != TRAINED_THRESHOLD:
            rise = fallback[other] - fallback[TRAINED_THRESHOLD]
            slopes[f"fallback_slope_{side}"] = rise / (other - TRAINED_THRESHOLD)
    return slopes
