from typing import Annotated

from pydantic import Field

from moecore.experts.eigen import Eigen
from moecore.experts.mlp import Mlp

Experts = Annotated[Eigen | Mlp, Field(discriminator="kind")]
