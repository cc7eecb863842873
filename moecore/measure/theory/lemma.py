"""Lemma 1 of Puigcerver et al. (2022) at the tokens of a trained model's MoE layers.

n tokens of width d; see nn/layers/smooth.py for the lemma of one layer.
"""

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.streams import derived_seed
from moecore.measure.base import Estimate
from moecore.nn.backbones.model import BackboneModel, Model
from moecore.nn.layers.moe import MoELayer
from moecore.nn.layers.smooth import Lemma1, lemma_1, why_undefined
from moecore.nn.predict import eval_mode, image_batches
from moecore.statistics.intervals import bootstrap_mean

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Distribution(Estimate):
    """The mean over tokens with its interval, quantiles ("0.05" to "0.95") and the maximum."""

    quantiles: dict[str, float]
    max: float


class LemmaLayer(Config):
    """Lemma 1 at the tokens of one MoE layer: ‖J‖ ≤ bound = experts + router."""

    tokens: int
    violations: int  # 0, or the code is wrong
    router_share: float  # of the bound
    jacobian: Distribution
    experts: Distribution
    router: Distribution
    bound: Distribution
    slack: Distribution  # 1 − ‖J‖ / bound


class LemmaSummary(Config):
    """Lemma 1 over all MoE layers; None where it says nothing of the model, for a ``reason``."""

    reason: str | None = None
    tokens: int | None = None
    violations: int | None = None
    router_share: float | None = None
    slack: float | None = None


class LemmaPoints(Config):
    """The terms of Lemma 1 at each token of a layer, as its picture shows them."""

    bound: tuple[float, ...]
    jacobian: tuple[float, ...]
    router: tuple[float, ...]


class Lemma(Config):
    """Lemma 1 of a model; no layers where it is undefined."""

    layers: tuple[LemmaLayer, ...]
    lemma1: LemmaSummary
    lemma_terms: tuple[LemmaPoints, ...]


def evaluate_lemma(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> Lemma:
    """Lemma 1 at ``tokens`` tokens of these images in each MoE layer, drawn with ``seed``."""
    if reason := why_lemma_undefined(model):
        return Lemma(layers=(), lemma1=LemmaSummary(reason=reason), lemma_terms=())
    terms = lemma_terms_by_layer(model, images, tokens, batch, seed, device)
    layers = [summarize_layer(layer) for layer in terms]
    points = [
        LemmaPoints(
            bound=layer.bound.tolist(),
            jacobian=layer.jacobian.tolist(),
            router=layer.router.tolist(),
        )
        for layer in terms
    ]
    return Lemma(layers=layers, lemma1=summarize_lemma(layers), lemma_terms=points)


def why_lemma_undefined(model: Model) -> str | None:
    """Why the lemma says nothing of this model; None where it does."""
    if model.moe is None:
        return "dense: there is no router and there are no experts"
    return why_undefined(model.moe.router.kind)


def lemma_terms_by_layer(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[Lemma1]:
    """The lemma's terms at the tokens of each MoE layer, on the CPU."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    given = layer_tokens(model, images, tokens, batch, seed, device)
    return [
        Lemma1(*(term.cpu() for term in lemma_1(layer, own)))
        for layer, own in zip(layers, given, strict=True)
    ]


def layer_tokens(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[Tensor]:
    """Tokens (n, d) at the input of each MoE layer, the same places for every method."""
    if not isinstance(model, BackboneModel):
        raise TypeError(
            "layer_tokens: a model that asks its teacher is not followed block by block"
        )
    blocks = model.experts_and_router.indices(model.depth)
    with (
        eval_mode(model),
        torch.no_grad(),
        torch.autocast(torch.device(device).type, enabled=False),
    ):
        encoded = [
            model.encode(pixels, "mlp_input", blocks)[2]
            for pixels in image_batches(images, batch, device)
        ]
    layers = [torch.cat(layer).flatten(0, 1) for layer in zip(*encoded, strict=True)]
    return [layer[_token_places(len(layer), tokens, seed).to(layer.device)] for layer in layers]


def _token_places(count: int, tokens: int, seed: int) -> Tensor:
    """Return which tokens of ``count``; the same in layers that have as many, a hierarchy's have
    fewer.
    """
    drawn = np.random.default_rng(derived_seed("measured_tokens", seed))
    return torch.from_numpy(np.sort(drawn.permutation(count)[:tokens]))


def summarize_layer(layer_terms: Lemma1) -> LemmaLayer:
    """One MoE layer: both sides of the lemma, and how often the right one is smaller (never)."""
    return LemmaLayer(
        tokens=len(layer_terms.jacobian),
        violations=int(layer_terms.violated.sum()),
        router_share=float((layer_terms.router / layer_terms.bound).nan_to_num().mean()),
        jacobian=value_distribution(layer_terms.jacobian),
        experts=value_distribution(layer_terms.experts),
        router=value_distribution(layer_terms.router),
        bound=value_distribution(layer_terms.bound),
        slack=value_distribution(layer_terms.slack),
    )


def value_distribution(values: Tensor) -> Distribution:
    """Return the distribution of one value per token, (n,)."""
    mean = bootstrap_mean(values.numpy())
    quantiles = np.quantile(values.numpy(), QUANTILES).tolist()
    return Distribution(
        **mean._asdict(),
        quantiles=dict(zip(map(str, QUANTILES), quantiles, strict=True)),
        max=float(values.max()),
    )


def summarize_lemma(layers: list[LemmaLayer]) -> LemmaSummary:
    """Tokens and violations of all layers, means of the router's share and of the slack."""
    return LemmaSummary(
        tokens=sum(layer.tokens for layer in layers),
        violations=sum(layer.violations for layer in layers),
        router_share=sum(layer.router_share for layer in layers) / len(layers),
        slack=sum(layer.slack.value for layer in layers) / len(layers),
    )
