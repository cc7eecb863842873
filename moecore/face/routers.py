"""Routers, each the settings of one: who sends which token to which expert."""

from moecore.nn.routers.base import Router as Router
from moecore.nn.routers.eigenbasis import Eigenbasis as Eigenbasis
from moecore.nn.routers.expert_choice import ExpertChoice as ExpertChoice
from moecore.nn.routers.frozen_copy import FrozenCopy as FrozenCopy
from moecore.nn.routers.hash import Hash as Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK as NoisyTopK
from moecore.nn.routers.soft_slots import SoftSlots as SoftSlots
from moecore.nn.routers.teacher_routed import TeacherRouted as TeacherRouted
from moecore.nn.routers.top_k_softmax import TopKSoftmax as TopKSoftmax
