"""One entry under ``methods:``: who routes, to which experts, under which losses."""

from pydantic import Field, model_validator

from moecore.config import Config
from moecore.experts import Experts
from moecore.layers.moe import Blocks, MoE
from moecore.records import Feature
from moecore.regularizers import Regularizer
from moecore.routers import Router


class TeacherRouter(Config):
    """The router on the frozen teacher's features (TGR-MoE, §3.2)."""

    features: Feature = Field(default="mlp_input", description="where the teacher's features are read")
    load: float = Field(default=0.005, ge=0, description="weight of the squared coefficient of variation of the experts' mean probability")
    entropy: float = Field(default=0.005, ge=0, description="weight of the mean token entropy")


class Method(Config):
    """A routing method. Without ``router`` and ``experts`` it is a dense model."""

    router: Router | None = None
    experts: Experts | None = None
    blocks: Blocks = Field(default="last_2", description="blocks that hold experts: every_2, last_2, or indices from 0")
    regularizers: tuple[Regularizer, ...] = ()
    teacher_router: TeacherRouter = TeacherRouter()

    @model_validator(mode="after")
    def _router_with_experts(self) -> "Method":
        if (self.router is None) != (self.experts is None):
            raise ValueError("a method has both `router` and `experts`, or neither (a dense model)")
        return self

    @property
    def moe(self) -> MoE | None:
        return None if self.router is None or self.experts is None else MoE(router=self.router, experts=self.experts, blocks=self.blocks)

    @property
    def guided(self) -> bool:
        """Whether a regularizer needs a teacher."""
        return any("guidance" in regularizer.needs for regularizer in self.regularizers)

    @property
    def provided(self) -> frozenset[str]:
        """What regularizers may need and this method has by itself."""
        return frozenset() if self.router is None else self.router.provides | {"routing"}

    def for_finetuning(self, k: int | None, guided: bool) -> "Method":
        """The method with another k, and without the losses that need a teacher unless ``guided``."""
        kept = tuple(loss for loss in self.regularizers if guided or "guidance" not in loss.needs)
        router = self.router.model_copy(update={"k": k}) if self.router is not None and k is not None else self.router
        return self.model_copy(update={"regularizers": kept, "router": router})
