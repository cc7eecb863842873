"""How fast a trained model's logits can change (dense against experts), and Lemma 1 of Puigcerver et al. (2022) at the tokens of its MoE layers.

    python -m stages.lipschitz <phase> <method> <seed>
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.data.prepared import spread
from moecore.evaluation.intervals import Interval, bootstrap_mean, wilson
from moecore.evaluation.lipschitz import Lipschitz, lipschitz_estimates
from moecore.evaluation.predict import batches, evaluating
from moecore.history import record
from moecore.layers.moe import MoELayer
from moecore.layers.smooth import Lemma1, lemma_1, why_undefined
from moecore.params import read
from moecore.refusals import flat_images_with_classes
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class LipschitzSettings(Config):
    """Which test images and tokens are measured, and how far from an image the ascent looks."""

    images: int = Field(100, ge=1, description="Test images, evenly spread over the split; the same for every method.")
    lemma_tokens: int = Field(64, ge=1, description="Tokens of these images at which Lemma 1 is evaluated in each MoE layer, drawn with `seed`.")
    batch: int = Field(50, ge=1, description="Images a forward pass; no result depends on it.")
    seed: int = Field(0, ge=0, description="Draws the tokens.")
    radius: float = Field(0.5, gt=0, description="Radius of the ℓ2 ball around an image, in pixel units [0, 1], in which the ascent looks.")
    steps: int = Field(10, ge=0, description="Gradient steps of the ascent, from each of two starts.")
    halvings: int = Field(10, ge=0, le=24, description="How often the steepest pair is halved; at a jump its ratio doubles each time.")


class Params(Config):
    lipschitz: LipschitzSettings


def mean_of(values: Tensor) -> Interval:
    """Mean of one value an image or a token, (N,), with its 95 % bootstrap interval."""
    return bootstrap_mean(values.numpy())


def summarised(found: Lipschitz, settings: LipschitzSettings) -> dict[str, Any]:
    """Means with intervals and maxima over images; ``resolution`` is the distance of a pair as long as the radius once it is halved."""
    crossed = int(found.crossed.sum())
    values = {
        "local_mean": mean_of(found.local), "local_max": float(found.local.max()),
        "margin_mean": mean_of(found.margin), "margin_max": float(found.margin.max()),
        "reached_mean": mean_of(found.reached), "reached_max": float(found.reached.max()),
        "lower_bound": float(found.lower_bound.max()), "lower_bound_mean": mean_of(found.lower_bound),
        "at_boundary": wilson(crossed, len(found.crossed)), "jump_max": float(found.jump.max()),
    }  # fmt: skip
    return values | {"radius": settings.radius, "resolution": settings.radius / 2**settings.halvings}


def tokens_of(model: nn.Module, images: np.ndarray, settings: LipschitzSettings, device: str) -> list[Tensor]:
    """Tokens (n, d) at the input of each MoE layer, the same places for every method."""
    blocks = model.moe.indices(model.depth)
    with evaluating(model), torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
        parts = [model.encode(pixels, "mlp_input", blocks)[2] for pixels in batches(images, settings.batch, device)]
    layers = [torch.cat(layer).flatten(0, 1) for layer in zip(*parts, strict=True)]
    chosen = np.random.default_rng(settings.seed).permutation(len(layers[0]))[: settings.lemma_tokens]
    return [layer[torch.from_numpy(np.sort(chosen)).to(layer.device)] for layer in layers]


def distribution(values: Tensor) -> dict[str, Any]:
    """Mean with its interval, quantiles and maximum of one value a token, (n,)."""
    quantiles = np.quantile(values.numpy(), QUANTILES)
    return mean_of(values)._asdict() | {"quantiles": dict(zip(map(str, QUANTILES), quantiles.tolist(), strict=True)), "max": float(values.max())}


def layer_of(found: Lemma1) -> dict[str, Any]:
    """One MoE layer: both sides of the lemma, their terms, and how often the right one is smaller (never)."""
    terms = {"jacobian": found.jacobian, "experts": found.experts, "router": found.router, "bound": found.bound, "slack": found.slack}
    share = float((found.router / found.bound).nan_to_num().mean())
    counts = {"tokens": len(found.jacobian), "violations": int(found.violated.sum()), "router_share": share}
    return counts | {name: distribution(values) for name, values in terms.items()}


def lemma_of(model: nn.Module, images: np.ndarray, settings: LipschitzSettings, device: str) -> tuple[str | None, list[Lemma1]]:
    """Why the lemma says nothing of this model (None where it does), and its terms in each MoE layer, on the CPU."""
    if model.moe is None:
        return "dense: there is no router and there are no experts", []
    if reason := why_undefined(model.moe.router.kind):
        return reason, []
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    tokens = tokens_of(model, images, settings, device)
    return None, [Lemma1(*(term.cpu() for term in lemma_1(layer, own))) for layer, own in zip(layers, tokens, strict=True)]


def lemma_summary(reason: str | None, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The lemma over all MoE layers: number of tokens and violations, means of the router's share and of the slack; null where undefined."""
    if not layers:
        return {"reason": reason, "tokens": None, "violations": None, "router_share": None, "slack": None}
    share, slack = (sum(values) / len(layers) for values in ([x["router_share"] for x in layers], [x["slack"]["value"] for x in layers]))
    return {
        "reason": None, "tokens": sum(x["tokens"] for x in layers), "violations": sum(x["violations"] for x in layers),
        "router_share": share, "slack": slack,
    }  # fmt: skip


def lipschitz(phase: Phase, method: str, seed: int) -> None:
    params, device = read(Params), tune().device
    settings, test = params.lipschitz, flat_images_with_classes(Path("artifacts/data") / phase, "lipschitz").test
    where = spread(len(test.labels), settings.images)
    images, labels = test.images[where], torch.from_numpy(test.labels[where])
    with record("lipschitz", params, phase=phase, method=method, seed=seed) as run:
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(device)
        found = lipschitz_estimates(model, images, labels, settings.batch, settings.radius, settings.steps, settings.halvings)
        reason, terms = lemma_of(model, images, settings, device)
        layers = [layer_of(each) for each in terms]
        if terms:  # by name: a drawing is no input of a result
            figure = importlib.import_module("moecore.report.figures_lipschitz").lemma_terms
            run.figure("lemma_terms", figure([(each.bound.tolist(), each.jacobian.tolist(), each.router.tolist()) for each in terms]))
        run.summary({"images": len(labels), **summarised(found, settings), "layers": layers, "lemma1": lemma_summary(reason, layers)})


if __name__ == "__main__":
    run_stage(lipschitz)
