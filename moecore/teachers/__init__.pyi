"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import Backbone
from moecore.training.settings import Training
from moecore.training.teachers.base import Teacher as Teacher
from moecore.training.teachers.dense import Dense as _Dense
from moecore.training.teachers.no_teacher import NoTeacher as _NoTeacher
from moecore.training.teachers.open_clip import OpenClip as _OpenClip
from moecore.training.teachers.timm import Timm as _Timm

class Dense(_Dense):
    """A dense teacher of any depth and width, with the student's patches; one per seed."""
    training: Training
    data: Source | None = None
    """its training data, of the size of data.pretrain; null: data.pretrain"""
    model: Backbone

class NoTeacher(_NoTeacher):
    """No teacher is trained; methods that need one are refused."""
    training: None = None
    data: Source | None = None

class OpenClip(_OpenClip):
    """A CLIP from a checkpoint file, from which a two-tower model starts (``upcycle``)."""
    training: None = None
    data: Source | None = None
    checkpoint: str
    """a .safetensors file such as open_clip_model.safetensors"""
    activation: Literal['gelu', 'quick_gelu'] = 'gelu'
    """quick_gelu: for OpenAI's weights; the file does not tell"""

class Timm(_Timm):
    """A timm model by name, with timm's weights (downloaded) or weights from a file."""
    training: None = None
    data: Source | None = None
    name: str
    """timm's model name, for example deit3_small_patch16_224.fb_in22k_ft_in1k"""
    checkpoint: str | None = None
    """a .safetensors file with timm's names; null: download"""
