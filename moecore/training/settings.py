"""The settings of a training run."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from moecore.core.config import Config
from moecore.data.views.views import Mix, ViewSettings
from moecore.training.runtime import Precision
from moecore.training.settings import Adversarial

Groups = list[dict[str, Any]]  # of parameters, as torch's optimizers take them


class Adamw(Config):
    """Adam with decay apart from the gradient (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    decays: ClassVar[bool] = True

    def build(self, groups: Groups, rate: float) -> torch.optim.Optimizer:
        """Build the optimizer of groups with a ``weight_decay`` each."""
        return torch.optim.AdamW(groups, lr=rate, fused=True)


class Adam(Config):
    """Adam without decay (Kingma & Ba 2015)."""

    kind: Literal["adam"] = "adam"
    decays: ClassVar[bool] = False

    def build(self, groups: Groups, rate: float) -> torch.optim.Optimizer:
        """Build the optimizer of groups that have no decay."""
        return torch.optim.Adam(groups, lr=rate, fused=True)


class Sgd(Config):
    """Stochastic gradient descent with momentum, without decay: m ← μm + g, w ← w − rate · m."""

    kind: Literal["sgd"] = "sgd"
    decays: ClassVar[bool] = False
    momentum: float = Field(0.9, ge=0, lt=1, description="μ; 0 for none")

    def build(self, groups: Groups, rate: float) -> torch.optim.Optimizer:
        """Build the optimizer of groups that have no decay."""
        # torch's fused kernel takes no sharded parameters; Adam's do.
        sharded = any(hasattr(one, "device_mesh") for group in groups for one in group["params"])
        return torch.optim.SGD(groups, lr=rate, momentum=self.momentum, fused=not sharded)


Optimizer = Annotated[Adam | Adamw | Sgd, Field(discriminator="kind")]
DECAY = 0.05


def _default_decay(given: Mapping[str, Any]) -> float:
    """The weight decay where none is written, after the fields above it: AdamW's, or none."""
    optimizer = given.get("optimizer")
    return 0.0 if optimizer is not None and not optimizer.decays else DECAY


class Training(Config):
    """One training run: optimizer, cosine schedule with linear warm-up, augmented views."""

    epochs: int = Field(ge=1, le=10**6)
    batch: int = Field(ge=1, description="images per step")
    learning_rate: float = Field(gt=0, description="peak, after the warm-up")
    final_learning_rate: float = Field(1e-6, ge=0, description="at the end of the cosine")
    warmup_epochs: float = Field(1.0, ge=0)
    optimizer: Optimizer = Field(Adamw(), description="adamw, adam or sgd")
    weight_decay: float = Field(
        default_factory=_default_decay,
        ge=0,
        description="on matrices; not on biases, norms, tokens and positions; adamw only",
        json_schema_extra={"default": DECAY},
    )
    clip: float | None = Field(1.0, gt=0, description="largest norm of the gradient; null for none")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    views: ViewSettings = ViewSettings()
    mix: Mix | None = Field(None, description="mixup and cutmix; null for none")
    adversarial: Adversarial | None = Field(
        None, description="learn from attacked images; null for the images as they are"
    )
    updates: int | None = Field(
        None,
        ge=1,
        le=10**9,
        description="updates of an epoch; null: as many as go once over the training data",
    )
    shard: int = Field(
        1, ge=1, description="ranks that share parameters and optimizer's state; 1: each has all"
    )
    expert_parallel: int = Field(
        1, ge=1, description="ranks that share whole experts, to which tokens travel: 1, or shard"
    )
    precision: Precision = Field("auto", description="auto: bfloat16 where a probe finds it faster")
    log_every: int = Field(20, ge=1, description="steps between two logged points")
    checkpoint_every: int = Field(
        100, ge=1, description="steps between checkpoints, rounded up to a logged point"
    )

    @field_validator("weight_decay")
    @classmethod
    def _decays(cls, decay: float, info: ValidationInfo) -> float:
        optimizer = info.data.get("optimizer")
        if decay and optimizer is not None and not optimizer.decays:
            problem = f"found {decay:g} with optimizer.kind {optimizer.kind}, which has no decay"
            raise ValueError(f"{problem}; allowed: 0, or optimizer: {{kind: adamw}}")
        return decay


class Finetuning(Training):
    """Fine-tuning: other data, images of another size, another k, with or without the teacher."""

    shots: int | None = Field(None, ge=1, description="training images per class; null for all")
    k: int | None = Field(
        None, ge=1, description="experts per token from then on; null: the method's"
    )
    guided: bool = Field(False, description="keep the regularizers that need the teacher")


class AdversarialFinetuning(Finetuning):
    """Fine-tuning on attacked images only: the same settings, with an attack in any case."""

    adversarial: Adversarial = Field(
        Adversarial(), description="the attack; without it the paper's: 10 steps, 8/255"
    )


class TeacherRouterFit(Config):
    """Fitting a linear router on each aligned block of the frozen teacher."""

    steps: Annotated[int, Field(ge=1)] = 300
    batch: Annotated[int, Field(ge=1)] = 256
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
