"""Floor 4: the same weights under another router setting at test time: sweeps over k and over the threshold (ERMoE, figures S3 and S5)."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.config import Config
from moecore.evaluation.predict import device_of, predictions
from moecore.evaluation.sweeps import row
from moecore.routers import Router
from moecore.training.guide import Guided


class Sweeps(Config):
    """Which settings of the router are tried on the trained weights. Nothing is chosen by them: they only show what was at stake."""

    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 2, 4), description="Experts per token; those above a model's number of experts are left out"
    )
    threshold: tuple[Annotated[float, Field(ge=-1, le=1)], ...] = Field(
        (0.1, 0.3, 0.5, 0.7, 0.9), description="Thresholds of routers that have one (a cosine); the others have no such sweep"
    )
    images: int = Field(300, ge=1, description="Of the images that the routing is measured on, evenly spread; the same for every method")


def with_router(model: nn.Module, router: Router) -> nn.Module:
    """A new model of the same weights, device and mode whose MoE layers follow ``router``; the given model and the global RNG stay as they are.

    model: of a backbone, with MoE layers, or Guided: the new one then shares its guide.  router: of the model's own kind.
    """
    if isinstance(model, Guided):
        guided = Guided(with_router(model.model, router), model.guide)
        guided.training = model.training  # not train(): that would reach the guide
        return guided
    with torch.random.fork_rng(devices=[]):  # drawn and then overwritten
        other = model.config.build(model.image, model.moe.model_copy(update={"router": router}))
    other.load_state_dict(model.state_dict())
    return other.to(device_of(model)).train(model.training)


def over_k(model: nn.Module, images, labels: Tensor, numbers: tuple[int, ...], batch: int) -> list[dict[str, Any]]:
    """One row for each k ≤ E of ``numbers``; [] for a dense model and for a router without k (soft slots).

    images: (N, C, H, W) as of ``predictions``; labels: (N,).  Rows are those of ``evaluation.sweeps.row`` with ``k`` and
    ``own``, whether the model was trained with it.
    """
    router = None if model.moe is None else model.moe.router
    if getattr(router, "k", None) is None:
        return []
    allowed = [k for k in numbers if k <= model.moe.experts.number]
    return [{"k": k, "own": k == router.k, **_row(model, router.with_k(k), images, labels, batch)} for k in allowed]


def over_threshold(model: nn.Module, images, labels: Tensor, thresholds: tuple[float, ...], batch: int) -> list[dict[str, Any]]:
    """As ``over_k``, one row for each threshold; [] for a dense model and for a router without a threshold."""
    router = None if model.moe is None else model.moe.router
    if getattr(router, "threshold", None) is None:
        return []
    changed = {threshold: router.model_copy(update={"threshold": threshold}) for threshold in thresholds}
    return [{"threshold": t, "own": t == router.threshold, **_row(model, other, images, labels, batch)} for t, other in changed.items()]


def sweep(model: nn.Module, images, labels: Tensor, settings: Sweeps, batch: int) -> dict[str, list[dict[str, Any]]]:
    """Both sweeps, by name."""
    return {
        "k": over_k(model, images, labels, settings.k, batch),
        "threshold": over_threshold(model, images, labels, settings.threshold, batch),
    }


def _row(model: nn.Module, router: Router, images, labels: Tensor, batch: int) -> dict[str, Any]:
    logits, records = predictions(with_router(model, router), images, batch)
    return row(logits, labels, records, router.k, getattr(router, "threshold", None))
