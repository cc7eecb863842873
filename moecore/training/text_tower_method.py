"""What a method makes of the text tower of a two-tower model."""

from typing import Literal

from pydantic import Field, model_validator

from moecore.core.config import AnySettings, Config
from moecore.core.files import UserError
from moecore.nn.backbones.text_tower import TextTowerSettings
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import Blocks, MoESettings
from moecore.nn.routers.base import Router
from moecore.training.regularizers.base import Regularizer


class TextTowerMethod(Config):
    """Experts, regularizers, and when the tower stays as it is."""

    router: Router | None = None
    experts: Experts | None = None
    blocks: Blocks = Field("last_2", description="blocks of the text tower that hold experts")
    regularizers: tuple[Regularizer, ...] = Field(
        (), description="of the routing of captions: none that needs views or a teacher"
    )
    frozen: Literal["never", "finetune", "always"] | None = Field(
        None, description="when the text tower stays as it is; null: as `model.text` says"
    )

    @model_validator(mode="after")
    def _whole(self) -> "TextTowerMethod":
        if (self.router is None) != (self.experts is None):
            raise ValueError("text has both `router` and `experts`, or neither (a dense tower)")
        for regularizer in self.regularizers:
            if lacking := sorted(regularizer.needs - {"routing", "load"}):
                problem = f"{regularizer.kind} needs {', '.join(lacking)}"
                raise ValueError(f"text.regularizers: {problem}, which captions do not have")
        if any(getattr(one, "level", "batch") != "batch" for one in self.regularizers):
            problem = "a step's captions are routed together"
            raise ValueError(f"text.regularizers: {problem}; allowed: level: batch")
        balance = getattr(self.router, "balance", None)
        if balance is not None and balance.kind == "quantile":
            problem = "found quantile, which takes equally many tokens from all ranks"
            raise ValueError(f"text.router.balance: {problem}; allowed: loss_free, sinkhorn")
        if self.regularizers and self.router is None:
            raise ValueError("text.regularizers: a dense text tower routes nothing; leave them out")
        return self

    def configure_tower(self, tower: TextTowerSettings) -> TextTowerSettings:
        """The tower with these experts, and frozen as said here."""
        moe = None
        if self.router is not None and self.experts is not None:
            moe = MoESettings(router=self.router, experts=self.experts, blocks=self.blocks)
        return tower.model_copy(update={"moe": moe, "frozen": self.frozen or tower.frozen})


def merge_text_tower_settings(part: TextTowerMethod, model: AnySettings) -> AnySettings:
    """The section ``model`` with the text tower that ``part`` makes. UserError without one."""
    tower = getattr(model, "text", None)
    if not isinstance(tower, TextTowerSettings):
        allowed = "leave it out, or model.kind: two_towers"
        raise UserError(f"text: the model has no text tower; allowed: {allowed}")
    return model.model_copy(update={"text": part.configure_tower(tower)})
