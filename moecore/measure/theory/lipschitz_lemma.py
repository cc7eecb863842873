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
    """Put violations of Lemma 1 and the router's share of its bound, at some tokens per layer.

    A violation would be an error of the code. facts: lemma_terms, per layer the terms at each
    token; lemma_reason, if the lemma is not defined for the model, which then has no values.
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
    """Return the reason why the lemma is not defined for this model, or None."""
    if model.moe is None:
        return "dense: there is no router and there are no experts"
    score = getattr(model.moe.router, "score", "softmax")
    if score != "softmax":
        return f"router {model.moe.router.kind}: its score is {score}, no softmax"
    if model.moe.experts.networks != model.moe.experts.choices:
        return "experts.zero_computation: some experts are no networks"
    if "previous" in model.moe.router.wants:
        return f"router {model.moe.router.kind}: its logits also depend on the layer before"
    return why_lemma_fails(model.moe.router.kind)


def lemma_terms_by_layer(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[LemmaTerms]:
    """Return the lemma's terms at tokens of each MoE layer, on the CPU."""
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    inputs = layer_tokens(model, images, tokens, batch, seed, device)
    return [
        LemmaTerms(*(term.cpu() for term in lemma_1_terms(layer, layer_inputs)))
        for layer, layer_inputs in zip(layers, inputs, strict=True)
    ]


def layer_tokens(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[Tensor]:
    """Return tokens (n, d) at the input of each MoE layer, the same places for every method."""
    if not isinstance(model, BackboneModel):
        raise TypeError("layer_tokens: a guided model has no encoding block by block")
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
    """Draw indices of tokens below ``count``; the same in layers with as many tokens."""
    generator = np.random.default_rng(derived_seed("measured_tokens", seed))
    return torch.from_numpy(np.sort(generator.permutation(count)[:tokens]))
