"""Regularizers, losses beside the task. Calling one gives its unweighted term."""

from moecore.training.regularizers.base import Regularizer as Regularizer
from moecore.training.regularizers.entropy import Entropy as Entropy
from moecore.training.regularizers.group_sparsity import GroupSparsity as GroupSparsity
from moecore.training.regularizers.importance import Importance as Importance
from moecore.training.regularizers.jensen_shannon import JensenShannon as JensenShannon
from moecore.training.regularizers.load import Load as Load
from moecore.training.regularizers.orthogonality import Orthogonality as Orthogonality
from moecore.training.regularizers.pairwise_consistency import (
    PairwiseConsistency as PairwiseConsistency,
)
from moecore.training.regularizers.region_routing import RegionRouting as RegionRouting
from moecore.training.regularizers.router_kl import RouterKl as RouterKl
from moecore.training.regularizers.teacher_router import TeacherRouter as TeacherRouter
from moecore.training.regularizers.z_loss import ZLoss as ZLoss
