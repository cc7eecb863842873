"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.nn.balances.base import Balance
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.routers.base import Router
from moecore.nn.routers.base import Router as Router
from moecore.nn.routers.competition import Competition as _Competition
from moecore.nn.routers.cosine import Cosine as _Cosine
from moecore.nn.routers.depth import Depth as _Depth
from moecore.nn.routers.dynamic import Dynamic as _Dynamic
from moecore.nn.routers.eigenbasis import Eigenbasis as _Eigenbasis
from moecore.nn.routers.expert_choice import ExpertChoice as _ExpertChoice
from moecore.nn.routers.folded import Folded as _Folded
from moecore.nn.routers.frozen_copy import FrozenCopy as _FrozenCopy
from moecore.nn.routers.hash import Hash as _Hash
from moecore.nn.routers.merged import Merged as _Merged
from moecore.nn.routers.noisy_top_k import GroupLimitedChoice as _GroupLimitedChoice
from moecore.nn.routers.noisy_top_k import NoisyTopK as _NoisyTopK
from moecore.nn.routers.relu import Relu as _Relu
from moecore.nn.routers.soft_slots import SoftSlots as _SoftSlots
from moecore.nn.routers.teacher_routed import TeacherRouted as _TeacherRouted
from moecore.nn.routers.told import Told as _Told
from moecore.nn.routers.top_k_softmax import TopKSoftmax as _TopKSoftmax
from moecore.nn.routers.top_p import TopP as _TopP

class Competition(_Competition):
    """Choose the top k of a softmax, renormalised; in a few training steps experts compete.

    In such a step a layer computes all experts, which takes E / k times the experts' time, and the
    k with the largest mean softplus of their outputs are chosen. Its penalty is part of the
    objective."""
    k: int = 2
    """experts per token"""
    share: float = 0.07
    """chance that a layer competes in a step"""
    warmup: float = 0.05
    """share of the training before any compete"""
    router_weight: float
    """weight of the router's loss: the mean squared distance of its probs to the softmax of the
    experts' strengths (paper 1e-3, code 1e-2)"""
    chosen_weight: float
    """the same over chosen experts (paper 0.2, code 0.1)"""
    diversity_weight: float
    """of half the mean cosine of chosen outputs; k ≥ 2"""
    bal_comp: float = 0.01
    """balance loss on strengths, in competing steps"""
    balance: Balance | None = None
    """balancing of the load by shifting the choice by the softmax; null: none"""

class Cosine(_Cosine):
    """Use cosines in a narrow space, divided by a learned temperature, as noisy_top_k's logits.

    Gates are not renormalised unless ``renormalise`` says so, and there is no noise by default."""
    k: int = 2
    """experts per token"""
    noise_std: float = 0.0
    """on logits, in training; unit: 1 / experts"""
    capacity_factor: float | None = None
    """maximum tokens per expert in training / even share; null: all"""
    eval_capacity_factor: float | None = None
    """likewise in evaluation and under attack; predictions then depend on the other images of a
    group; null: no limit"""
    batch_priority: bool = False
    """serve tokens by largest gate, highest first"""
    group_size: int = 8
    """images that share a capacity"""
    renormalise: bool | Literal['straight'] = False
    """let the chosen gates sum to 1 (with k = 1 the router then has no task gradient); straight:
    likewise, but with the gradient of gates divided by a constant"""
    task_gradient: bool = True
    """false: only the router's losses teach it (TGR)"""
    score: Literal['softmax', 'sigmoid', 'sqrt_softplus'] = 'softmax'
    """function from logits to scores: softmax over all experts, or per expert a sigmoid or the root
    of softplus"""
    scale: float = 1.0
    """factor of all weights"""
    groups: _GroupLimitedChoice | None = None
    """groups of experts; a token chooses within a few of them; null: none"""
    balance: Balance | None = None
    """balancing of the load without a loss, by shifting the choice; null: none"""
    input_jitter: float = 0.0
    """training: tokens × uniform 1 ± this"""
    start: Literal['normal', 'orthonormal'] = 'normal'
    """orthonormal: initial rows, without weight decay (simbal)"""
    residual: bool = False
    """add a map, first 0, of the last layer's logits"""
    embedding: int | None = None
    """width; null: half the number of experts"""
    temperature: float = 0.3
    """initial divisor of the cosines"""

class Depth(_Depth):
    """Let the ``share`` of an image's tokens with the largest scores r use experts, weighted by r.

    An inner router chooses their experts; the output of all other tokens is 0. Participation
    depends on all tokens of the image. For text, ``sampling`` trains a prediction from each token
    alone, and evaluation uses the prediction."""
    share: float = 0.125
    """share of images' tokens that use experts"""
    sampling: Literal['bce', 'predictor'] | None = None
    """decision per token alone in evaluation: bce: r > 0; predictor: score > 0 of a small network;
    null: by rank, as in training"""
    sampling_weight: float = 0.01
    """of the penalty that teaches the decision"""
    router: _NoisyTopK = ...
    """router of the tokens that use experts"""

class Dynamic(_Dynamic):
    """Choose the experts whose σ(cosine with the token) is above their threshold, equally weighted.

    A token below all thresholds uses no expert in training, and the nearest in evaluation. The loss
    ``diversity_simplicity`` keeps embeddings apart and short. Every slot is computed, so fewer
    experts save no time."""

class Eigenbasis(_Eigenbasis):
    """Choose the best k experts by cos(Bᵀx, Bᵀc) of token x and context c, above a threshold.

    B (d, r) is each expert's basis, or the router's if experts have none (ERMoE, table S3, `plain
    weights`). c is what the token's attention gathered: attention · tokens by default, or its
    output. A learned context reads no attention: the score is cos(Bᵀx, ψ) with a vector ψ in R^r
    per expert (ERMoE's brain model, algorithm 2, line 8)."""
    k: int = 2
    """experts per token, at most"""
    threshold: float = 0.5
    """eligible experts' cosines are above it"""
    selection: Literal['prune', 'literal'] = 'prune'
    """prune: eligible experts only; literal: Algorithm 1 as is"""
    context: Literal['tokens', 'attention_output', 'learned'] = 'tokens'
    """c: attention · tokens, the attention's output, or a learned vector"""
    rank: int | None = None
    """if experts have no basis; null: 2/3 width"""

class ExpertChoice(_ExpertChoice):
    """Let each expert take the tokens with its largest gates, a softmax over a linear map."""
    k: int = 2
    """mean number of experts per token, at capacity_factor 1"""
    capacity_factor: float = 1.0
    """tokens per expert / (tokens·k/experts)"""
    noise_std: float = 1.0
    """on logits, in training; unit: 1 / experts"""
    group_size: int = 1
    """images per choice of an expert, in training"""

class Folded(_Folded):
    """Choose merged experts by a router of the original ones; sum its weights and probs by cluster.

    The stage ``merge`` writes this section. The buffer ``clusters`` has each original expert's
    cluster, the index of its merged expert; initially, consecutive experts in equal numbers."""
    router: Router = ...
    """the router before experts were merged"""
    experts: int = 8
    """number of experts before merging"""

class FrozenCopy(_FrozenCopy):
    """Train a noisy top-k router for a share of the training, then freeze it, without noise.

    StableMoE freezes a small distilled copy; here, as in TGR-MoE, the router itself is frozen. It
    stays frozen when its model is fine-tuned."""
    router: _NoisyTopK = ...
    """the router of the first phase"""
    until: float = 0.5
    """share of training when the router learns"""

class GroupLimitedChoice(_GroupLimitedChoice):
    """Limit a token's choice to the ``kept`` groups of adjacent experts with the largest values.

    A group's value is the sum of its ``per_group`` best scores. Only the choice is constrained:
    experts are not placed on devices by group, so that no communication is saved."""
    number: int
    """number of groups, which have equally many experts"""
    kept: int
    """number of groups that a token chooses within"""
    per_group: int | None = None
    """best scores that value a group; null: k / kept, at least 1"""

class Hash(_Hash):
    """Choose k experts by a fixed hash of each word, patch or position, with weight 1/k each.

    Words have an identity to hash, patches do not: `patch` sends similar patches to the same
    experts (*our choice*). Load then follows the frequency of patches (on scikit-learn's digits, 8
    experts got 2 to 28 %), and of words with `word`; `position` is balanced."""
    k: int = 1
    """experts per token"""
    by: Literal['patch', 'position', 'word'] = 'patch'
    """hash the patch minus its mean, the position, or the text's word"""
    seed: int = 0
    """seed of the hash"""

class Merged(_Merged):
    """Average the experts' parameters per image, with shares that its mean token decides.

    All tokens of an image use the merged expert. A token costs as much as with one expert; merging
    costs as much as E additional tokens per image, plus memory for the merged parameters."""
    normalise: bool = True
    """layer norm of mean token and router (authors' code)"""

class NoisyTopK(_NoisyTopK):
    """Choose the k largest gates of a softmax over a linear map of the token, noisy in training."""
    k: int = 2
    """experts per token"""
    noise_std: float = 1.0
    """on logits, in training; unit: 1 / experts"""
    capacity_factor: float | None = None
    """maximum tokens per expert in training / even share; null: all"""
    eval_capacity_factor: float | None = None
    """likewise in evaluation and under attack; predictions then depend on the other images of a
    group; null: no limit"""
    batch_priority: bool = False
    """serve tokens by largest gate, highest first"""
    group_size: int = 8
    """images that share a capacity"""
    renormalise: bool | Literal['straight'] = False
    """let the chosen gates sum to 1 (with k = 1 the router then has no task gradient); straight:
    likewise, but with the gradient of gates divided by a constant"""
    task_gradient: bool = True
    """false: only the router's losses teach it (TGR)"""
    score: Literal['softmax', 'sigmoid', 'sqrt_softplus'] = 'softmax'
    """function from logits to scores: softmax over all experts, or per expert a sigmoid or the root
    of softplus"""
    scale: float = 1.0
    """factor of all weights"""
    groups: _GroupLimitedChoice | None = None
    """groups of experts; a token chooses within a few of them; null: none"""
    balance: Balance | None = None
    """balancing of the load without a loss, by shifting the choice; null: none"""
    input_jitter: float = 0.0
    """training: tokens × uniform 1 ± this"""
    start: Literal['normal', 'orthonormal'] = 'normal'
    """orthonormal: initial rows, without weight decay (simbal)"""
    residual: bool = False
    """add a map, first 0, of the last layer's logits"""

class Relu(_Relu):
    """Weight experts by the ReLU of their logits, without normalising; a token uses 0 to E experts.

    The loss ``adaptive_l1`` moves their mean number to ``k``. Every slot is computed, so fewer
    experts save no time, and the first steps are nearly dense."""
    k: int = 2
    """mean experts per token, the target of adaptive_l1"""
    l1_start: float = 1e-08
    """weight of adaptive_l1 at the start (λ)"""
    l1_factor: float = 1.2
    """multiplies (divides) λ after a step of too many (few) experts"""

class SoftSlots(_SoftSlots):
    """Mix an image's tokens into slots, and the slots' outputs into each token's output.

    Both are weighted means. The papers give each expert p = round(T · capacity factor / E) slots:
    49 for the T = 197 tokens of ViT-S/16 on 224 pixels, E = 8 and a factor of 2."""
    slots: int = 1
    """slots per expert: round(tokens·k / experts)"""

class TeacherRouted(_TeacherRouted):
    """Let the teacher's router choose and weigh experts; the student's only imitates it.

    `router_kl` teaches the student's router. The teacher is frozen except for its router, which
    learns from the task and the loss `load`; `importance` and `router_kl` read the student's probs.
    Measurements read the router that decides: the teacher's, unless `inference` is `student`."""
    k: int = 2
    """experts per token"""
    noise_std: float = 1.0
    """on the teacher's log probs; unit: 1 / experts"""
    inference: Literal['teacher', 'student'] = 'teacher'
    """it decides in evaluation; in training the student never does"""

class Told(_Told):
    """Send tokens of kind n = 1, 2, … to expert ⌊(n − 1) / ``together``⌋ mod E; unknown: expert 0.

    A kind is the true group of a token of generated data. Nothing is learned: this is the upper
    bound of what a router can find (*our own*)."""
    together: int = 1
    """adjacent kinds that share an expert, a family"""

class TopKSoftmax(_TopKSoftmax):
    """Choose the k largest logits of a linear map with bias; weights are the softmax of these.

    All else is as in noisy_top_k, without noise by default. With k = 1 the weight is always 1, so
    that only regularizers teach the router, not the task."""
    k: int = 2
    """experts per token; 1: only regularizers teach the router"""
    noise_std: float = 0.0
    """on logits, in training; unit: 1 / experts"""
    capacity_factor: float | None = None
    """maximum tokens per expert in training / even share; null: all"""
    eval_capacity_factor: float | None = None
    """likewise in evaluation and under attack; predictions then depend on the other images of a
    group; null: no limit"""
    batch_priority: bool = False
    """serve tokens by largest gate, highest first"""
    group_size: int = 8
    """images that share a capacity"""
    renormalise: bool | Literal['straight'] = True
    """chosen gates sum to 1; see noisy_top_k"""
    task_gradient: bool = True
    """false: only the router's losses teach it (TGR)"""
    score: Literal['softmax', 'sigmoid', 'sqrt_softplus'] = 'softmax'
    """function from logits to scores: softmax over all experts, or per expert a sigmoid or the root
    of softplus"""
    scale: float = 1.0
    """factor of all weights"""
    groups: _GroupLimitedChoice | None = None
    """groups of experts; a token chooses within a few of them; null: none"""
    balance: Balance | None = None
    """balancing of the load without a loss, by shifting the choice; null: none"""
    input_jitter: float = 0.0
    """training: tokens × uniform 1 ± this"""
    start: Literal['normal', 'orthonormal'] = 'normal'
    """orthonormal: initial rows, without weight decay (simbal)"""
    residual: bool = False
    """add a map, first 0, of the last layer's logits"""

class TopP(_TopP):
    """Choose the most probable experts, as few as reach a sum of probs above ``threshold``.

    Their probs are their weights. Certain tokens use one expert, uncertain ones several; the loss
    ``entropy`` makes tokens more certain. All ``k`` slots are computed, so fewer experts save no
    time."""
    threshold: float = 0.4
    """sum of probs at which experts suffice"""
    k: int | None = None
    """maximum number of experts per token; null: all"""
    noise_std: float = 0.0
    """on logits, in training; unit: 1 / experts"""
    balance: LossFree | None = None
    """a bias on the order of experts; null: none"""
