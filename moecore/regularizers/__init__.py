from typing import Annotated

from pydantic import Field

from moecore.regularizers.importance import Importance
from moecore.regularizers.load import Load
from moecore.regularizers.router_kl import RouterKl
from moecore.regularizers.z_loss import ZLoss

Regularizer = Annotated[Importance | Load | RouterKl | ZLoss, Field(discriminator="kind")]
