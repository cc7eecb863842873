"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.nn.balances.base import Balance as Balance
from moecore.nn.balances.loss_free import LossFree as _LossFree
from moecore.nn.balances.quantile import Quantile as _Quantile
from moecore.nn.balances.sinkhorn import Sinkhorn as _Sinkhorn

class LossFree(_LossFree):
    """Lower the bias of experts that were chosen too often, and raise the bias of other experts.

    The bias shifts the choice in evaluation too, but never the weights."""
    rate: float = 0.001
    """change per step, in scores"""
    rule: Literal['sign', 'recentred', 'proportional'] = 'sign'
    """change of a bias: sign: ± the rate; recentred: minus the mean of these; proportional: the
    rate times the missing load, in even shares"""
    until: float = 1.0
    """share of training when the bias changes"""

class Quantile(_Quantile):
    """After each step, set each expert's bias so that an even share of the tokens chooses it.

    A token's cut is its (k + 1)-th largest score + old bias, the best that was not chosen. An
    expert's new bias is the one with which its score + bias reaches the cut of an even share of the
    tokens (Kimi K3's report, §2.3.3). It shifts the choice in evaluation too, never the weights."""
    decay: float = 0.0
    """share of the old bias; 0: last batch only"""

class Sinkhorn(_Sinkhorn):
    """Choose by exp(logits), rescaled so that all tokens and all experts have even totals.

    This holds in training; evaluation chooses by the logits."""
    group_size: int = 8
    """images that share a plan"""
    tolerance: float = 0.0001
    """mean change of factors in a converged plan"""
    rounds: int = 100
    """maximum iterations; always all on a GPU"""
