"""The backbones that a `model:` section may name."""

from typing import Annotated

from pydantic import Field

from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.swin_moe import SwinMoe
from moecore.nn.backbones.swin_v2 import SwinV2
from moecore.nn.backbones.two_towers import TwoTowers
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d

Backbone = Annotated[
    SingleLayer | Vit | Swin | SwinMoe | SwinV2 | Vit3d | LanguageModel | TwoTowers,
    Field(discriminator="kind"),
]
