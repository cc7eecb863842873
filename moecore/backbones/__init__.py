"""The backbones that a `model:` section may name."""

from typing import Annotated

from pydantic import Field

from moecore.backbones.single_layer import SingleLayer
from moecore.backbones.vit import Vit

Backbone = Annotated[SingleLayer | Vit, Field(discriminator="kind")]
