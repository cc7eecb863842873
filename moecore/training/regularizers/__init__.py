"""The losses beside the task that a method of params.yaml may name under `regularizers`."""

from typing import Annotated

from pydantic import Field

from moecore.training.regularizers.entropy import Entropy
from moecore.training.regularizers.group_sparsity import GroupSparsity
from moecore.training.regularizers.importance import Importance
from moecore.training.regularizers.jensen_shannon import JensenShannon
from moecore.training.regularizers.load import Load
from moecore.training.regularizers.orthogonality import Orthogonality
from moecore.training.regularizers.pairwise_consistency import PairwiseConsistency
from moecore.training.regularizers.region_routing import RegionRouting
from moecore.training.regularizers.router_kl import RouterKl
from moecore.training.regularizers.teacher_router import TeacherRouter
from moecore.training.regularizers.z_loss import ZLoss

Regularizer = Annotated[
    Entropy
    | GroupSparsity
    | Importance
    | JensenShannon
    | Load
    | Orthogonality
    | PairwiseConsistency
    | RegionRouting
    | RouterKl
    | TeacherRouter
    | ZLoss,
    Field(discriminator="kind"),
]
