"""The settings of a training run."""

from typing import Annotated

from pydantic import Field

from moecore.core.config import Config
from moecore.data.views.mix import Mix
from moecore.data.views.views import ViewSettings
from moecore.nn.layers.positions import Interpolation
from moecore.training.adversarial import Adversarial
from moecore.training.runtime import Precision


class Training(Config):
    """One training run: AdamW, cosine schedule with linear warm-up, augmented views."""

    epochs: int = Field(ge=1)
    batch: int = Field(ge=1, description="images per step")
    learning_rate: float = Field(gt=0, description="peak, after the warm-up")
    final_learning_rate: float = Field(default=1e-6, ge=0, description="at the end of the cosine")
    warmup_epochs: float = Field(default=1.0, ge=0)
    weight_decay: float = Field(
        default=0.05, ge=0, description="on matrices; not on biases, norms, tokens and positions"
    )
    clip: float | None = Field(
        default=1.0, gt=0, description="largest norm of the gradient; null for none"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    views: ViewSettings = ViewSettings()
    mix: Mix | None = Field(default=None, description="mixup and cutmix; null for none")
    adversarial: Adversarial | None = Field(
        default=None, description="learn from attacked images; null for the images as they are"
    )
    precision: Precision = Field(
        default="auto", description="auto: bfloat16 where a probe finds it faster"
    )
    log_every: int = Field(default=20, ge=1, description="steps between two logged points")
    checkpoint_every: int = Field(
        default=100,
        ge=1,
        description="steps between two checkpoints (rounded up to a logged point)",
    )


class Finetuning(Training):
    """Fine-tuning on other data: fewer images, another resolution, another k, with or without the
    teacher.
    """

    shots: int | None = Field(
        default=None, ge=1, description="training images per class; null for all"
    )
    k: int | None = Field(
        default=None,
        ge=1,
        description="experts per token while fine-tuning and after; null keeps the method's",
    )
    guided: bool = Field(
        default=False,
        description="keep the regularizers that need the teacher (TGR during fine-tuning); "
        "a method's own guided_finetuning goes before",
    )
    interpolation: Interpolation = "bilinear"


class AdversarialFinetuning(Finetuning):
    """Fine-tuning on attacked images only: the same settings, with an attack in any case."""

    adversarial: Adversarial = Field(
        default=Adversarial(), description="the attack; without it the paper's: 10 steps, 8/255"
    )


class TeacherRouterFit(Config):
    """Fitting a linear router on each aligned block of the frozen teacher."""

    steps: Annotated[int, Field(ge=1)] = 300
    batch: Annotated[int, Field(ge=1)] = 256
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
