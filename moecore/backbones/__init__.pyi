"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.nn.backbones.base_model import Backbone as Backbone
from moecore.nn.backbones.language_model import LanguageModel as _LanguageModel
from moecore.nn.backbones.sfcn import Sfcn as _Sfcn
from moecore.nn.backbones.single_layer import SingleLayer as _SingleLayer
from moecore.nn.backbones.swin import Swin as _Swin
from moecore.nn.backbones.swin_moe import SwinMoe as _SwinMoe
from moecore.nn.backbones.swin_v2 import SwinV2 as _SwinV2
from moecore.nn.backbones.two_towers import TextTowerSettings as _TextTowerSettings
from moecore.nn.backbones.two_towers import TwoTowers as _TwoTowers
from moecore.nn.backbones.vit import Vit as _Vit
from moecore.nn.backbones.vit3d import Vit3d as _Vit3d
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import MoESettings as _MoESettings
from moecore.nn.routers.base import Router

class LanguageModel(_LanguageModel):
    """Settings of a language model with span attention and a cache of previous tokens."""
    width: int = 128
    """width of a token, d"""
    depth: int = 3
    """number of blocks"""
    heads: int = 8
    """attention heads; they divide the width"""
    span: int = 256
    """previous tokens a token attends to, L, in each block"""
    layers: Literal['smoe', 'momentum', 'adam'] = 'smoe'
    """how a feed-forward's output is added: unchanged, with momentum over blocks, or with momentum
    after a first block of Adam"""
    mlp_ratio: float = 1.0
    """hidden width of a dense feed-forward over d"""
    dropout: float = 0.1
    """of attention and of dense feed-forwards"""

class MoESettings(_MoESettings):
    """Settings of a model's MoE layers: router, experts, and the blocks that have them."""
    router: Router
    experts: Experts
    blocks: Literal['every_2', 'last_2', 'all'] | tuple[int, ...] = 'last_2'
    """blocks with experts: every_2, last_2, all, or indices from 0"""

class Sfcn(_Sfcn):
    """Settings of a Simple Fully Convolutional Network for brain age; defaults as published."""
    channels: tuple[int, ...] = ...
    """all but the last halve the volume"""
    dropout: float = 0.5
    """dropout before the head"""
    head: Literal['bins', 'number'] = 'bins'
    """probabilities of bins of the label, or the task's outputs"""
    first_bin: float = 42.0
    """lower edge of the first bin, in the label's unit"""
    bin_width: float = 1.0
    """width of a bin, in the label's unit"""
    bins: int = 40
    """number of bins"""
    bin_deviation: float = 1.0
    """σ of a label's distribution, in its unit"""

class SingleLayer(_SingleLayer):
    """One feed-forward layer without residual or norm, then a classifier (MoGE, §2.4)."""
    hidden: int = 64
    """hidden width of a dense model's layer"""
    activation: Literal['gelu', 'quick_gelu', 'linear'] = 'gelu'
    """of a dense model's layer; linear: none"""

class Swin(_Swin):
    """Swin V1 (Liu et al. 2021): pre-norm blocks, a table of position biases."""
    patch: int = 4
    """side of a patch, pixels"""
    width: int = 96
    """in the first stage; doubles per stage"""
    depths: tuple[int, ...] = ...
    """blocks of each stage"""
    heads: tuple[int, ...] = ...
    """heads of each stage"""
    window: int = 7
    """side of a window, tokens; a smaller grid: one window"""
    pretrained_windows: tuple[int, ...] | None = None
    """swin_moe, swin_v2: window of the learned positions, per stage"""
    mlp_ratio: float = 4.0
    """hidden width of the dense MLP / width"""
    qkv_bias: bool = True
    drop_path: float = 0.0
    """stochastic depth at the last block"""

class SwinMoe(_SwinMoe):
    """Swin V1 with a continuous position bias; its routers get the task's gradient at k = 1."""
    patch: int = 4
    """side of a patch, pixels"""
    width: int = 96
    """in the first stage; doubles per stage"""
    depths: tuple[int, ...] = ...
    """blocks of each stage"""
    heads: tuple[int, ...] = ...
    """heads of each stage"""
    window: int = 7
    """side of a window, tokens; a smaller grid: one window"""
    pretrained_windows: tuple[int, ...] | None = None
    """swin_moe, swin_v2: window of the learned positions, per stage"""
    mlp_ratio: float = 4.0
    """hidden width of the dense MLP / width"""
    qkv_bias: bool = True
    drop_path: float = 0.0
    """stochastic depth at the last block"""

class SwinV2(_SwinV2):
    """Post-norm blocks, cosine attention and a continuous position bias.

    At k = 1 the norm after the experts removes the length that the router's weight gave to an
    expert's output, and with it almost all of the router's task gradient."""
    patch: int = 4
    """side of a patch, pixels"""
    width: int = 96
    """in the first stage; doubles per stage"""
    depths: tuple[int, ...] = ...
    """blocks of each stage"""
    heads: tuple[int, ...] = ...
    """heads of each stage"""
    window: int = 7
    """side of a window, tokens; a smaller grid: one window"""
    pretrained_windows: tuple[int, ...] | None = None
    """swin_moe, swin_v2: window of the learned positions, per stage"""
    mlp_ratio: float = 4.0
    """hidden width of the dense MLP / width"""
    qkv_bias: bool = True
    drop_path: float = 0.0
    """stochastic depth at the last block"""

class TextTowerSettings(_TextTowerSettings):
    """Settings of a transformer over captions."""
    width: int = 64
    """width of a token"""
    depth: int = 2
    """number of blocks"""
    heads: int = 4
    """number of attention heads; divides the width"""
    mlp_ratio: float = 4.0
    """hidden width of the dense MLP / width"""
    mask: Literal['causal', 'full'] = 'causal'
    """a token attends to itself and earlier ones, or to all (SigLIP)"""
    pooling: Literal['end', 'class'] = 'end'
    """embed the end or a learned token"""
    activation: Literal['gelu', 'quick_gelu'] = 'gelu'
    """quick_gelu: x·σ(1.702 x), for OpenAI's weights"""
    frozen: Literal['never', 'finetune', 'always'] = 'never'
    """when the tower neither learns nor drops values (LiT)"""
    moe: _MoESettings | None = None
    """experts of this tower, by a method's `text`"""

class TwoTowers(_TwoTowers):
    """Settings of a model of images and captions."""
    image: _Vit | _Swin | _SwinMoe | _SwinV2
    """the image tower; its head is the projection"""
    text: _TextTowerSettings = ...
    joint: int = 64
    """width of an embedding"""
    pairs: Literal['softmax', 'sigmoid'] = 'softmax'
    """loss: CLIP's cross-entropy, or SigLIP's sigmoid of pairs"""

class Vit(_Vit):
    """Settings of a vision transformer of images (B, C, H, W)."""
    patch: int = 16
    """side of a patch, pixels or voxels"""
    width: int = 192
    """width of a token"""
    depth: int = 12
    """number of blocks"""
    heads: int = 3
    """number of attention heads; divides the width"""
    mlp_ratio: float = 4.0
    """hidden width of the dense MLP / width"""
    pooling: Literal['class', 'class+distillation', 'mean'] = 'class'
    """head on the class token, also the distillation token, or the mean"""
    position_on_class: bool = True
    """special tokens get positions (not DeiT-III)"""
    layer_scale: float | None = None
    """initial; null: off (DeiT-III: 1e-6)"""
    qkv_bias: bool = True
    pre_norm: bool = False
    """a norm before the first block (CLIP's image tower)"""
    activation: Literal['gelu', 'quick_gelu', 'linear'] = 'gelu'
    """of dense MLPs; quick_gelu: x·σ(1.702 x), as in CLIP; linear: none"""
    norm_eps: float = 1e-06
    """added to the variance (CLIP: 1e-5)"""
    drop_path: float = 0.0
    """stochastic depth at the last block"""
    initial_std: float = 0.02
    """attention, MLPs, experts"""
    position_std: float = 0.02
    """of positions, special tokens"""
    stem: Literal['linear', 'conv'] = 'linear'
    """map from patch to token: linear, or convolutions before it"""
    stem_width: int = 16
    """conv: channels of the first convolution"""

class Vit3d(_Vit3d):
    """Settings of a vision transformer over cubes of volumes (B, C, D, H, W)."""
    patch: int = 16
    """side of a patch, pixels or voxels"""
    width: int = 192
    """width of a token"""
    depth: int = 12
    """number of blocks"""
    heads: int = 3
    """number of attention heads; divides the width"""
    mlp_ratio: float = 4.0
    """hidden width of the dense MLP / width"""
    pooling: Literal['class', 'class+distillation', 'mean'] = 'class'
    """head on the class token, also the distillation token, or the mean"""
    position_on_class: bool = True
    """special tokens get positions (not DeiT-III)"""
    layer_scale: float | None = None
    """initial; null: off (DeiT-III: 1e-6)"""
    qkv_bias: bool = True
    pre_norm: bool = False
    """a norm before the first block (CLIP's image tower)"""
    activation: Literal['gelu', 'quick_gelu', 'linear'] = 'gelu'
    """of dense MLPs; quick_gelu: x·σ(1.702 x), as in CLIP; linear: none"""
    norm_eps: float = 1e-06
    """added to the variance (CLIP: 1e-5)"""
    drop_path: float = 0.0
    """stochastic depth at the last block"""
    initial_std: float = 0.02
    """attention, MLPs, experts"""
    position_std: float = 0.02
    """of positions, special tokens"""
    stem: Literal['linear', 'pooled', 'conv'] = 'linear'
    """map from cube to token: linear, linear in means, or two convolutions"""
    pool: int = 4
    """pooled: means per axis of a cube; divides the patch"""
    stem_width: int = 16
    """conv: channels of the first convolution"""
    positions: Literal['learned', 'sinusoidal'] = 'learned'
    """learned, or fixed sinusoids along the three axes"""
