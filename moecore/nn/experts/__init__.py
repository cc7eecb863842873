from typing import Annotated

from pydantic import Field

from moecore.nn.experts.eigen import Eigen
from moecore.nn.experts.mlp import Mlp

Experts = Annotated[Eigen | Mlp, Field(discriminator="kind")]
