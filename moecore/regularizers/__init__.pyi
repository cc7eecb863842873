"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.training.regularizers.adaptive_l1 import AdaptiveL1 as _AdaptiveL1
from moecore.training.regularizers.base import Regularizer as Regularizer
from moecore.training.regularizers.diversity_simplicity import DiversitySimplicity as _DiversitySimplicity
from moecore.training.regularizers.entropy import Entropy as _Entropy
from moecore.training.regularizers.group_sparsity import GroupSparsity as _GroupSparsity
from moecore.training.regularizers.importance import Importance as _Importance
from moecore.training.regularizers.jensen_shannon import JensenShannon as _JensenShannon
from moecore.training.regularizers.load import Load as _Load
from moecore.training.regularizers.orthogonality import Orthogonality as _Orthogonality
from moecore.training.regularizers.pairwise_consistency import PairwiseConsistency as _PairwiseConsistency
from moecore.training.regularizers.region_routing import RegionRouting as _RegionRouting
from moecore.training.regularizers.router_kl import RouterKl as _RouterKl
from moecore.training.regularizers.simbal import Simbal as _Simbal
from moecore.training.regularizers.switch_balance import SwitchBalance as _SwitchBalance
from moecore.training.regularizers.teacher_router import TeacherRouter as _TeacherRouter
from moecore.training.regularizers.truth_kl import TruthKl as _TruthKl
from moecore.training.regularizers.z_loss import ZLoss as _ZLoss
from moecore.training.regularizers.zero_computation_balance import ZeroComputationBalance as _ZeroComputationBalance

class AdaptiveL1(_AdaptiveL1):
    """ReMoE's L1 penalty: λ Σ_layers ``gate_l1_penalty``. The router ``relu`` adapts λ."""
    weight: float = 1.0
    """factor in the objective, times the router's λ"""

class DiversitySimplicity(_DiversitySimplicity):
    """DynMoE's loss on expert embeddings of the router ``dynamic``, summed over MoE layers."""
    weight: float = 0.01
    """factor in the objective"""

class Entropy(_Entropy):
    """Mean entropy of a token's probs, summed over MoE layers."""
    weight: float = 0.01
    """> 0 lowers entropy, < 0 raises"""

class GroupSparsity(_GroupSparsity):
    """MoGE's loss, which concentrates a token's probs in one neighbourhood of a map of the experts.

    It is summed over MoE layers. The Gaussian that weights a neighbourhood narrows during training;
    equal sigmas keep it constant."""
    weight: float = 0.004
    """factor in the objective"""
    filter: Literal['gaussian', 'average'] = 'gaussian'
    """weights within a neighbourhood; average takes no sigma"""
    size: int = 3
    """side of a neighbourhood, in experts; at most the map's"""
    sigma_start: float = 10.0
    """first σ, in experts"""
    sigma_end: float = 1.5
    """last σ; ≤ sigma_start"""
    exponent: float = 0.3
    """γ; below 1: narrows early"""
    reduction: Literal['mean', 'authors'] = 'mean'
    """mean: sum over positions, mean over tokens, so that the weight does not depend on the batch;
    authors: as in MoGE's published code, mean over positions, sum over the batch's tokens, divided
    by the neighbourhood's number of experts"""
    padding: Literal['valid', 'circular'] = 'valid'
    """valid: neighbourhoods lie inside the map, so a corner is in one and an inner expert in many;
    circular: the map's opposite sides are neighbours"""

class Importance(_Importance):
    """The importance loss, summed over MoE layers. TGR-MoE calls it the load loss."""
    weight: float = 0.005
    """factor in the objective"""

class JensenShannon(_JensenShannon):
    """Jensen–Shannon divergence of corresponding tokens' probs in two views, summed over layers.

    It does not balance the load: add importance and load."""
    weight: float = 0.005
    """our choice of the factor; the paper gives none"""
    special: bool = False
    """pair the class token with itself (on for ImageNet)"""

class Load(_Load):
    """The load loss, summed over MoE layers; for routers that give the chance of being chosen."""
    weight: float = 0.005
    """factor in the objective"""

class Orthogonality(_Orthogonality):
    """The orthogonality penalty, summed over every parameter that is called ``basis``."""
    weight: float = 5e-05
    """factor in the objective (the paper's λ)"""

class PairwiseConsistency(_PairwiseConsistency):
    """The PRC loss, summed over MoE layers. It replaces the balance losses; train without mixup."""
    weight: float = 1.0
    """factor in the objective"""
    diagonal: float = 0.005
    """of mean (1 − S_ii)²: rewards equal choices"""
    off_diagonal: float = 0.05
    """of the mean S_ij², i ≠ j: unequal choices"""
    special: bool = False
    """pair the class token with itself (on for ImageNet)"""

class RegionRouting(_RegionRouting):
    """Cross-entropy of router scores with the tissue's expert, for tokens of one-tissue volumes.

    Mean over MoE layers. *Our choice*: the paper warm-starts region experts on region-isolated
    inputs (algorithm 2, line 1), but does not say how the routers learn it. Forcing tokens to an
    expert instead would give the next layer information that is missing when the model is used."""
    weight: float = 1.0
    """factor in the objective"""

class RouterKl(_RouterKl):
    """KL from the teacher's routing to the student's, mean over MoE layers, up to ``until``."""
    weight: float = 5.0
    """factor in the objective"""
    until: float = 1.0
    """share of the training during which it acts"""

class Simbal(_Simbal):
    """SimBal: Σ |WWᵀ − I| over all entries and all routers W (E, d) with ``start: orthonormal``."""
    weight: float
    """factor in the objective; the paper's text has none"""

class SwitchBalance(_SwitchBalance):
    """The load balancing loss E Σ_e f_e P_e of Switch and GShard, summed over MoE layers.

    f_e is expert e's share of the choices in a set of tokens, P_e its mean probability; ``level``
    says what a set is, and the loss is the mean over sets. With level sequence, count_from probs
    and weight 1e-4 it is DeepSeek-V3's."""
    weight: float = 0.01
    """factor in the objective"""
    level: Literal['sequence', 'group', 'batch'] = 'batch'
    """tokens over which the load is even: each image or sequence, each group of images, or the
    batch over all ranks, in which images may differ"""
    group_size: int = 8
    """images per group; for the level group only"""
    count_from: Literal['routed', 'probs'] = 'routed'
    """experts that count: the chosen, or those with the largest probs"""

class TeacherRouter(_TeacherRouter):
    """CV² of mean probs times ``balance`` + token entropy times ``entropy``, of teacher routers."""
    weight: float = 1.0
    """factor in the objective"""
    balance: float = 0.005
    """factor of CV² of experts' mean probability"""
    entropy: float = 0.005
    """factor of the mean token entropy"""

class TruthKl(_TruthKl):
    """KL from routing by true token groups (router ``told``) to the model's, mean over MoE layers.

    *Our own*. It uses no teacher network, so it also acts in fine-tuning."""
    weight: float = 5.0
    """factor in the objective"""

class ZLoss(_ZLoss):
    """The router z-loss, summed over MoE layers."""
    weight: float = 0.001
    """factor in the objective"""

class ZeroComputationBalance(_ZeroComputationBalance):
    """MoE++'s load balancing loss for experts with ``zero_computation``, summed over MoE layers."""
    weight: float
    """factor in the objective; not given in the paper"""
    share: float = 0.75
    """τ, weight of the choices of experts without a network; a smaller τ makes them more
    frequent"""
