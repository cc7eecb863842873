"""Lemma 1 of Puigcerver et al. (2022) at the tokens of a trained model's MoE layers.

n tokens of width d; see nn/layers/layer_lipschitz_bound.py for the lemma of one layer.
"""

import numpy as np
import torch
from torch import Tensor

from moecore.core.streams import derived_seed
from moecore.measure.values import Values
from moecore.nn.backbones.base_model import BackboneModel, EncodeOptions, Model
from moecore.nn.layers.layer_lipschitz_bound import LemmaTerms, lemma_1_terms, why_lemma_fails
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import eval_mode, image_batches


def put_lemma(
    model: Model,
    images: np.ndarray,
    tokens: int,
    batch: int,
    seed: int,
    device: str,
    out: Values,
) -> None:
    """Put Lemma 1 at ``tokens`` tokens of these images in each MoE layer, drawn with ``seed``.

    Of all layers, tokens at which the bound is below what it bounds: above 0 the code is wrong; and
    the router's share of the bound. facts: lemma_terms, of each layer the terms at each token;
    lemma_reason, why the lemma says nothing of the model, which then has no values.
    """
    if reason := why_lemma_undefined(model):
        out.facts["lemma_reason"] = reason
        return
    terms = lemma_terms_by_layer(model, images, tokens, batch, seed, device)
    shares = [float((layer.router / layer.bound).nan_to_num().mean()) for layer in terms]
    out.put("lemma1_violations", sum(int(layer.violated.sum()) for layer in terms))
    out.put("lemma1_router_share", sum(shares) / len(shares))
    out.facts["lemma_terms"] = [
        {name: getattr(layer, name) for name in ("bound", "jacobian", "router")} for layer in terms
    ]


def why_lemma_undefined(model: Model) -> str | None:
    """Why the lemma says nothing of this model; None where it does."""
    if model.moe is None:
        return "dense: there is no router and there are no experts"
    score = getattr(model.moe.router, "score", "softmax")
    if score != "softmax":
        return f"router {model.moe.router.kind}: its score is {score}, no softmax"
    if model.moe.experts.networks != model.moe.experts.choices:
        return "experts.zero_computation: some experts are no networks"
    if "previous" in model.moe.router.wants:
        return f"router {model.moe.router.kind}: its logits are also of the layer before"
    return why_lemma_fails(model.moe.router.kind)


def lemma_terms_by_layer(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[LemmaTerms]:
    """The lemma's terms at the tokens of each MoE layer, on the CPU."""
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    given = layer_tokens(model, images, tokens, batch, seed, device)
    return [
        LemmaTerms(*(term.cpu() for term in lemma_1_terms(layer, own)))
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
            model.encode(pixels, EncodeOptions("mlp_input", blocks)).features
            for pixels in image_batches(images, batch, device)
        ]
    layers = [torch.cat(layer).flatten(0, 1) for layer in zip(*encoded, strict=True)]
    return [layer[_token_places(len(layer), tokens, seed).to(layer.device)] for layer in layers]


def _token_places(count: int, tokens: int, seed: int) -> Tensor:
    """Return which tokens of ``count``; the same in layers that have as many."""
    drawn = np.random.default_rng(derived_seed("measured_tokens", seed))
    return torch.from_numpy(np.sort(drawn.permutation(count)[:tokens]))
