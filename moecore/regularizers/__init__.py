from typing import Annotated

from pydantic import Field

from moecore.regularizers.entropy import Entropy
from moecore.regularizers.group_sparsity import GroupSparsity
from moecore.regularizers.importance import Importance
from moecore.regularizers.jensen_shannon import JensenShannon
from moecore.regularizers.load import Load
from moecore.regularizers.orthogonality import Orthogonality
from moecore.regularizers.pairwise_consistency import PairwiseConsistency
from moecore.regularizers.region_routing import RegionRouting
from moecore.regularizers.router_kl import RouterKl
from moecore.regularizers.teacher_router import TeacherRouter
from moecore.regularizers.z_loss import ZLoss

Regularizer = Annotated[
    Entropy | GroupSparsity | Importance | JensenShannon | Load | Orthogonality | PairwiseConsistency | RegionRouting | RouterKl | TeacherRouter | ZLoss,
    Field(discriminator="kind"),
]
