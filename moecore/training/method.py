"""One entry under ``methods:``: who routes, to which experts, under which losses."""

from typing import Literal

from pydantic import Field, model_validator

from moecore.core.config import AnySettings, Config, replace_and_validate, validate_again
from moecore.core.routing_records import Feature
from moecore.nn.backbones.base_model import Backbone
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import Blocks, MoESettings
from moecore.nn.routers.base import Router
from moecore.training.method import TextTowerMethod, merge_text_tower_settings
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.region_routing import RegionExpertSettings, RegionRouting
from moecore.training.regularizers.teacher_router import TeacherRouter as TeacherRouterLoss
from moecore.training.upcycling_kinds import Upcycling


class TeacherRouter(Config):
    """The router on the frozen teacher's features (TGR-MoE, §3.2)."""

    features: Feature = Field("mlp_input", description="where the teacher's features are read")
    load: float = Field(
        0.005, ge=0, description="weight of the CV² of the experts' mean probability"
    )
    entropy: float = Field(0.005, ge=0, description="weight of the mean token entropy")
    fit: Literal["fitted", "joint"] = Field(
        "fitted", description="by the stage teacher_router, or jointly while pretraining"
    )


class Method(Config):
    """A routing method. Without ``router`` and ``experts`` it is a dense model."""

    router: Router | None = None
    experts: Experts | None = None
    blocks: Blocks = Field(
        "last_2", description="with experts: every_2, last_2, all, or indices from 0"
    )
    regularizers: tuple[Regularizer, ...] = ()
    unguided_regularizers: tuple[Regularizer, ...] = Field(
        (), description="in fine-tuning without the teacher, instead of those that need it"
    )
    teacher_router: TeacherRouter = TeacherRouter()
    distillation: float = Field(
        0.0, ge=0, lt=1, description="share of DeiT's hard distillation in the loss"
    )
    guided_finetuning: bool | None = Field(
        None, description="fine-tune with the teacher; null: as `guided` of that phase says"
    )
    upcycle: Upcycling = Field(
        False,
        description="start from the teacher's weights, MLPs copied into experts; granular: cut "
        "into several experts each; drop: copies of which some hidden units are drawn anew",
    )
    regions: RegionExpertSettings | None = Field(
        None, description="region experts and their warm start (data with tissue maps)"
    )
    permuted: bool = Field(False, description="null control: training labels are permuted")
    model: dict[str, int | float | str] = Field(
        {}, description="what differs from the section `model`: {width: 128}"
    )
    text: TextTowerMethod | None = Field(
        None, description="the text tower of a two-tower model; null: dense"
    )
    pretrain: dict[str, int | float | dict[str, float]] = Field(
        {}, description="what differs from the section: {learning_rate: 7.0e-4}"
    )

    @model_validator(mode="after")
    def _fitting_experts(self) -> "Method":
        if (self.router is None) != (self.experts is None):
            raise ValueError("a method has both `router` and `experts`, or neither (a dense model)")
        if self.regions is None:
            return self
        if self.experts is None:
            mend = "give the method a router and experts, or leave out regions"
            raise ValueError(f"regions: a dense model has no experts to assign; {mend}")
        named, number = len(self.regions.experts), self.experts.choices
        if named > number:
            raise ValueError(f"regions.experts: found {named}; allowed: at most {number} experts")
        return self

    @property
    def isolates(self) -> bool:
        """Return whether some volumes keep one tissue while training."""
        return self.regions is not None and (
            self.regions.warm_start_epochs > 0 or self.regions.isolated > 0
        )

    @property
    def expert_names(self) -> tuple[str, ...]:
        """The experts' names: tissues, then free_<index>; else expert_<index>."""
        number = 0 if self.experts is None else self.experts.choices
        if self.regions is None:
            return tuple(f"expert_{index}" for index in range(number))
        free = range(len(self.regions.experts), number)
        return (*self.regions.experts, *(f"free_{index}" for index in free))

    def merge_model_settings(self, model: AnySettings) -> AnySettings:
        """The section ``model`` with this method's settings; UserError for other keys."""
        sized = replace_and_validate("model", model, self.model, Backbone)
        if self.text is None:
            return sized
        return merge_text_tower_settings(self.text, sized)

    def merge_pretrain_settings(self, settings: AnySettings) -> AnySettings:
        """The section ``pretrain``, likewise."""
        return replace_and_validate("pretrain", settings, self.pretrain)

    @property
    def moe(self) -> MoESettings | None:
        """Router and experts of each MoE layer; None for a dense model."""
        if self.router is None or self.experts is None:
            return None
        return MoESettings(router=self.router, experts=self.experts, blocks=self.blocks)

    @property
    def routed_by_teacher(self) -> bool:
        """Return whether the router asks the teacher at every image, also in use."""
        return self.router is not None and "teacher" in self.router.wants

    @property
    def guided_routing(self) -> bool:
        """Return whether the teacher's routers take part in training."""
        return self.routed_by_teacher or any(
            "guidance" in regularizer.needs for regularizer in self.regularizers
        )

    @property
    def guided(self) -> bool:
        """Return whether training needs the teacher at every step."""
        return self.guided_routing or self.distillation > 0

    @property
    def joint(self) -> bool:
        """Return whether the teacher's routers learn together with the student."""
        return self.guided_routing and self.teacher_router.fit == "joint"

    @property
    def losses(self) -> tuple[Regularizer, ...]:
        """The regularizers, the loss of jointly learned routers, and that of region experts."""
        losses: list[Regularizer] = list(self.regularizers)
        if self.joint:
            router = self.teacher_router
            losses.append(TeacherRouterLoss(balance=router.load, entropy=router.entropy))
        if self.isolates:
            losses.append(RegionRouting())
        return tuple(losses)

    @property
    def text_losses(self) -> tuple[Regularizer, ...]:
        """The regularizers of the text tower's routing."""
        return () if self.text is None else self.text.regularizers

    @property
    def views(self) -> int:
        """Return how many views of each image a step needs."""
        return 1 + any("two_views" in regularizer.needs for regularizer in self.regularizers)

    @property
    def provided(self) -> frozenset[str]:
        """Return what regularizers may need and this method has by itself."""
        if self.router is None or self.experts is None:
            return frozenset()
        return self.router.provides | self.experts.provides | {"routing"}

    def for_finetuning(self, k: int | None, guided: bool, same_classes: bool = False) -> "Method":
        """The method with another k, without a warm start, and with ``unguided_regularizers``
        instead of the losses that need a teacher, unless ``guided``, or the method's own
        ``guided_finetuning``, keeps these.

        Hard distillation goes on only where the teacher knows the new classes.
        """
        if self.guided_finetuning is not None:
            guided = self.guided_finetuning
        kept = self.regularizers
        if not guided:
            kept = tuple(loss for loss in kept if "guidance" not in loss.needs)
            kept += self.unguided_regularizers
        share = self.distillation if guided and same_classes else 0.0
        router = None if self.router is None else self.router.for_finetuning()
        if router is not None and k is not None:
            router = validate_again(router.with_k(k), f"finetune.k: found {k}, refused by router")
        return self.model_copy(
            update={
                "regularizers": kept,
                "router": router,
                "distillation": share,
                "upcycle": False,
                "regions": None,
            }
        )
