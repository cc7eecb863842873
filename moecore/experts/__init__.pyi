"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.nn.experts.base import Experts as Experts
from moecore.nn.experts.base import ZeroComputation as _ZeroComputation
from moecore.nn.experts.eigen import Eigen as _Eigen
from moecore.nn.experts.mlp import Mlp as _Mlp

class Eigen(_Eigen):
    """W1 = U diag(s) Bᵀ, GELU, W2, with biases; B (d, r) is orthonormal at the start."""
    number: int = 8
    """number of experts"""
    hidden_ratio: float = 4.0
    """hidden width / width of a token"""
    rank: int | None = None
    """columns of a basis; null: 2/3 d, at most 512"""
    factored_output: bool = False
    """factor the second map too, at this rank"""

class Mlp(_Mlp):
    """Linear(d, h), an activation, Linear(h, d) per expert, with biases; or SwiGLU without biases.

    ``shared`` experts see every token with weight 1 (DeepSeekMoE), in addition to the ``number`` of
    experts. If ``fine`` splits experts into pieces, ``shared`` of these pieces are shared and none
    is added, so that parameters and FLOPs stay equal."""
    number: int = 8
    """number of experts"""
    hidden_ratio: float = 4.0
    """hidden width / width of a token"""
    init: Literal['independent', 'identical', 'flat'] = 'independent'
    """independent or identical (V-MoE) initial experts, drawn as timm's ViT; flat: independent,
    uniform within ±1 / √(d·h), as in SMoE language models"""
    activation: Literal['gelu', 'relu', 'quick_gelu', 'linear', 'swiglu'] = 'gelu'
    """quick_gelu: x·σ(1.702 x), of OpenAI's CLIP; linear: none; swiglu: two maps to h numbers, silu
    of one times the other, no biases; its three matrices have the same size at 2/3 of the ratio"""
    shared: int = 0
    """additional experts of every token; fewer than routed"""
    fine: int | None = None
    """pieces of equal hidden width per expert: a token uses k · fine pieces, of which `shared` are
    the same for every token; null: experts are not split, and shared ones are added"""
    zero_computation: _ZeroComputation | None = None
    """experts without a network, additional choices (MoE++); null: none"""
    dropout: float = 0.0
    """share of hidden values zeroed in training"""

class ZeroComputation(_ZeroComputation):
    """Numbers of experts without a network, which follow the networks in a router's choices."""
    constants: int = 1
    """mix the token with a learned vector"""
    copies: int = 1
    """experts that return the token unchanged"""
    zeros: int = 1
    """experts returning 0: tokens skip the layer"""
