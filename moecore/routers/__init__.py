from typing import Annotated

from pydantic import Field

from moecore.routers.eigenbasis import Eigenbasis
from moecore.routers.expert_choice import ExpertChoice
from moecore.routers.frozen_copy import FrozenCopy
from moecore.routers.hash import Hash
from moecore.routers.noisy_top_k import NoisyTopK
from moecore.routers.soft_slots import SoftSlots
from moecore.routers.teacher_routed import TeacherRouted
from moecore.routers.top_k_softmax import TopKSoftmax

Router = Annotated[
    Eigenbasis | ExpertChoice | FrozenCopy | Hash | NoisyTopK | SoftSlots | TeacherRouted | TopKSoftmax,
    Field(discriminator="kind"),
]
