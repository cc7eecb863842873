"""Experts, each the settings of all experts of a layer."""

from moecore.nn.experts.base import Experts as Experts
from moecore.nn.experts.eigen import Eigen as Eigen
from moecore.nn.experts.mlp import Mlp as Mlp
