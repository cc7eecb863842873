from typing import Annotated

from pydantic import Field

from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.expert_choice import ExpertChoice
from moecore.nn.routers.frozen_copy import FrozenCopy
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.soft_slots import SoftSlots
from moecore.nn.routers.teacher_routed import TeacherRouted
from moecore.nn.routers.top_k_softmax import TopKSoftmax

Router = Annotated[
    Eigenbasis
    | ExpertChoice
    | FrozenCopy
    | Hash
    | NoisyTopK
    | SoftSlots
    | TeacherRouted
    | TopKSoftmax,
    Field(discriminator="kind"),
]
