"""Backbones, each the settings of a model, whose `build(image, moe)` gives it."""

from moecore.nn.backbones.base_model import Backbone as Backbone
from moecore.nn.backbones.language_model import LanguageModel as LanguageModel
from moecore.nn.backbones.single_layer import SingleLayer as SingleLayer
from moecore.nn.backbones.swin import Swin as Swin
from moecore.nn.backbones.swin_moe import SwinMoe as SwinMoe
from moecore.nn.backbones.swin_v2 import SwinV2 as SwinV2
from moecore.nn.backbones.two_towers import TwoTowers as TwoTowers
from moecore.nn.backbones.vit import Vit as Vit
from moecore.nn.backbones.vit3d import Vit3d as Vit3d
