"""The settings of a training run, its optimizer and its adversarial steps.

In adversarial training a step learns from images that an attack has changed first (Madry et al.,
2018; adversarial-moe, §4.2).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Generator, Tensor, nn

from moecore.attacks.pgd import Pgd
from moecore.core.config import Config
from moecore.core.ranks import current_ranks
from moecore.core.routing_records import Batch
from moecore.core.streams import RowsOfBatch
from moecore.core.surroundings import Misfits, Surroundings, format_changed_settings
from moecore.data.views.views import UNEVEN_REFUSAL, Mix, ViewSettings
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import eval_mode
from moecore.tasks.base import Task
from moecore.training.runtime import Precision

# what labels that are no single classes do not allow, and the value that switches it off
NEED_CLASSES = {"label_smoothing": 0, "shots": "null", "mix": "null"}
Groups = list[dict[str, Any]]  # of parameters, as torch's optimizers take them
DECAY = 0.05

FREE = ("_token", "pos_embed", "bias", "basis", "scale", "target")


class Adversarial(Config):
    """A PGD attack on the images of every step; the defaults are the paper's."""

    steps: int = Field(
        10, ge=1, description="of PGD on each batch; a training step costs as many more"
    )
    epsilon: float = Field(
        8 / 255, ge=0, le=1, description="radius of the L∞ ball; 0 changes nothing"
    )
    form: Literal["paper", "strong"] = Field(
        "paper", description="as the attack pgd has it; strong draws a random start"
    )

    def attacked(self, model: Model, task: Task, batch: Batch, generator: Generator) -> Batch:
        """The batch (every view of it) with adversarial images, fp32 in [0, 1].

        model: is attacked as it is used (no noise, no capacity, no autocast), and left as it was.
        generator: on the CPU, for the random start. Regularizers are not attacked.
        """
        attack = Pgd(steps=self.steps, form=self.form)
        own: Generator | list[Generator] = generator
        if self.form == "strong":  # the other form draws nothing
            own = local_image_generators(generator, batch.images)
        with eval_mode(model):  # the attack itself turns autocast off
            labels = model.targets(batch.labels).to(batch.images.device)
            images = attack(model, task, batch.images, labels, self.epsilon, own)
        return batch._replace(images=images)


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


def _default_decay(given: Mapping[str, Any]) -> float:
    """The weight decay where none is written, after the fields above it: AdamW's, or none."""
    optimizer = given.get("optimizer")
    return 0.0 if optimizer is not None and not optimizer.decays else DECAY


def batch_misfits(settings: Any, images: int, why: str) -> Misfits:
    """Yield a batch of more images than there are; why: what these are."""
    if settings.batch > images:
        text = f"found {settings.batch}, but there are {images} training images ({why})"
        yield ("batch",), f"{text}; allowed: 1 to {images}"


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

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield a warm-up without end, and what labels, images and their number do not allow."""
        if self.warmup_epochs > self.epochs:
            text = f"found {self.warmup_epochs:g}, but epochs is {self.epochs}"
            yield ("warmup_epochs",), f"{text}; allowed: 0 to {self.epochs}"
        for key, none in NEED_CLASSES.items():
            value = getattr(self, key, None)
            if value and (reason := around.lacks(key)):
                text = f"found {format_changed_settings(value)}, but {reason} ({around.data})"
                yield (key,), f"{text}; allowed: {none}"
        for key, usual in (("views", ViewSettings()), ("adversarial", None)):
            value = getattr(self, key)
            if around.is_text and value != usual:
                text = f"found {format_changed_settings(value)}, but {around.data} is text"
                yield (key,), f"{text}; allowed: leave it out"
        if around.source is not None and around.source.sided and self.views.flip:
            text = f"found true, but in {around.data} left and right matter"
            yield ("views", "flip"), f"{text}; allowed: false"
        if around.preview is not None:
            yield from self.views.pixel_misfits(around)
            yield from self._unfit_for_sizes(around)
            yield from self._unfit_for_number(around)

    def _unfit_for_sizes(self, around: Surroundings) -> Misfits:
        """Yield views of other sizes than the images have."""
        preview = around.preview
        if preview.short_side is not None:
            if self.views.crop is None:
                yield ("views", "crop"), f"found null, but in {around.data} {UNEVEN_REFUSAL}"
        elif self.views.shift >= min(preview.shape):
            text = f"found {self.views.shift}, but {around.data} has images of {preview.size}"
            yield ("views", "shift"), f"{text} pixels; allowed: less than that"

    def _unfit_for_number(self, around: Surroundings) -> Misfits:
        """Yield a batch, or shots of a class, of more images than there are."""
        preview = around.preview
        if not preview.counts:
            return
        counts = preview.counts["train"]
        images, why = sum(counts), around.data
        shots = getattr(self, "shots", None)
        if shots is not None and preview.classes:
            numbers, named = [number for number in counts if number], "a class"
            least = min(numbers)
            if len(counts) > 1:
                named = f"class {preview.classes[counts.index(least)]}"
            else:  # of drawn data the number of each class is not known yet
                numbers = [images // len(preview.classes)] * len(preview.classes)
                least = numbers[0]
            if shots > least:
                text = f"found {shots}, but {named} of {around.data} has {least} training images"
                yield ("shots",), f"{text}; allowed: 1 to {least}, or null"
                return
            images = shots * len(numbers)
            why = f"{shots} shots of {len(numbers)} classes"
        yield from batch_misfits(self, images, why)

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

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield text, of which there is no fine-tuning."""
        if around.is_text:
            yield (), f"found a section, but {around.data} is text; allowed: leave it out"
        yield from super().misfits(around)


class AdversarialFinetuning(Finetuning):
    """Fine-tuning on attacked images only: the same settings, with an attack in any case."""

    adversarial: Adversarial = Field(
        Adversarial(), description="the attack; without it the paper's: 10 steps, 8/255"
    )


class TeacherRouterFit(Config):
    """Fitting a linear router on each aligned block of the frozen teacher."""

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield a batch of more images than there are."""
        if around.preview is not None and around.preview.counts:
            yield from batch_misfits(self, around.preview.images["train"], around.data)

    steps: Annotated[int, Field(ge=1)] = 300
    batch: Annotated[int, Field(ge=1)] = 256
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3


def local_image_generators(generator: Generator, images: Tensor) -> Generator | list[Generator]:
    """Return what draws the random start of each of this rank's ``images``, as of a whole batch."""
    here = current_ranks()
    if here.size == 1:
        return generator
    states = []
    for _ in range(len(images) * here.size):
        states.append(generator.get_state())
        torch.rand(images.shape[1:], generator=generator)
    own = []
    for place in RowsOfBatch.of(torch.arange(len(states))).tolist():
        drawing = Generator()
        drawing.set_state(states[place])
        own.append(drawing)
    return own


def build_optimizer(
    model: nn.Module, settings: Training, routers: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer of ``settings``, fused; weight decay on matrices only, so on no bias, norm,
    token, position embedding, and no expert's basis, whose lengths its orthogonality penalty holds,
    nor on a router's rows that are to stay orthonormal.

    routers: those of the teacher where they learn too; a group of their own, without decay.
    """
    decayed, free = [], []
    held = {id(one) for part in model.modules() for one in getattr(part, "orthonormal_rows", ())}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.ndim >= 2 and not name.endswith(FREE) and id(parameter) not in held
        (decayed if matrix else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
        {"params": list(routers), "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return settings.optimizer.build(filled, settings.learning_rate)


def learning_rate(step: int, steps: int, warmup: float, settings: Training) -> float:
    """Rate of a step from 0: linear over ``warmup`` steps, then a half cosine to the final."""
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1.0, steps - warmup)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * (1 + math.cos(math.pi * share)) / 2
