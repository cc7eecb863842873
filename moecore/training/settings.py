"""Settings of a training: optimizer, schedule, batches, views and adversarial steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Generator, nn

from moecore.attacks.pgd import Pgd
from moecore.core import config, streams
from moecore.core.ranks import rank_and_size
from moecore.core.routing_records import Batch
from moecore.data.views.random_views import CROP_NEEDED, Mix, ViewSettings
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import eval_mode
from moecore.tasks.base import Task
from moecore.training.runtime import Precision

# Settings that need one class per image, and the value that turns them off.
SETTINGS_NEEDING_CLASSES = {"label_smoothing": 0, "shots": "null", "mix": "null"}
Groups = list[dict[str, Any]]  # parameter groups, as torch's optimizers take them
DEFAULT_WEIGHT_DECAY = 0.05
NO_DECAY_SUFFIXES = ("_token", "pos_embed", "bias", "basis", "scale", "target")


class Adversarial(config.Config):
    """A PGD attack on the images of every step (Madry et al., 2018; adversarial-moe, §4.2)."""

    steps: int = Field(10, ge=1, description="PGD steps per batch; each costs a training step")
    epsilon: float = Field(8 / 255, ge=0, le=1, description="radius of the L∞ ball; 0: no attack")
    form: Literal["paper", "strong"] = Field("paper", description="as in pgd; strong: random start")

    def attacked(self, model: Model, task: Task, batch: Batch, generator: Generator) -> Batch:
        """Return the batch with images that maximise the task loss, fp32 in [0, 1].

        The model is attacked as in use: no noise, no capacity, no autocast. generator: on the CPU.
        """
        attack = Pgd(steps=self.steps, form=self.form)
        generators: Generator | list[Generator] = generator
        if self.form == "strong":  # the form "paper" draws nothing
            generators = local_image_generators(generator, batch)
        with eval_mode(model):  # the attack itself turns autocast off
            labels = model.targets(batch.labels).to(batch.images.device)
            images = attack(model, task, batch.images, labels, self.epsilon, generators)
        return batch._replace(images=images)


class Adamw(config.Config):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    decays: ClassVar[bool] = True

    def build(self, groups: Groups, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=rate, fused=True)


class Adam(config.Config):
    """Adam without decay (Kingma & Ba 2015)."""

    kind: Literal["adam"] = "adam"
    decays: ClassVar[bool] = False

    def build(self, groups: Groups, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=rate, fused=True)


class Sgd(config.Config):
    """Stochastic gradient descent with momentum, without decay: m ← μm + g, w ← w − rate · m."""

    kind: Literal["sgd"] = "sgd"
    decays: ClassVar[bool] = False
    momentum: float = Field(0.9, ge=0, lt=1, description="μ; 0 for none")

    def build(self, groups: Groups, rate: float) -> torch.optim.Optimizer:
        # torch's fused SGD does not take sharded parameters; fused Adam does.
        parameters = [parameter for group in groups for parameter in group["params"]]
        sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        return torch.optim.SGD(groups, lr=rate, momentum=self.momentum, fused=not sharded)


Optimizer = Annotated[Adam | Adamw | Sgd, Field(discriminator="kind")]


def _default_decay(fields: Mapping[str, Any]) -> float:
    optimizer = fields.get("optimizer")
    if optimizer is not None and not optimizer.decays:
        return 0.0
    return DEFAULT_WEIGHT_DECAY


def large_batch_misfits(settings: Any, images: int, why: str) -> config.Misfits:
    """Yield (keys, message) if the batch exceeds ``images``; ``why``: the origin of that number."""
    if settings.batch > images:
        text = f"found {settings.batch}, but there are {images} training images ({why})"
        yield ("batch",), f"{text}; allowed: 1 to {images}"


class Training(config.Config):
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
        json_schema_extra={"default": DEFAULT_WEIGHT_DECAY},
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null for none")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    views: ViewSettings = ViewSettings()
    mix: Mix | None = Field(None, description="mixup and cutmix; null for none")
    adversarial: Adversarial | None = Field(None, description="learn from attacked images")
    updates: int | None = Field(
        None, ge=1, le=10**9, description="updates per epoch; null: one pass over the training data"
    )
    shots: int | None = Field(None, ge=1, description="drawn training images per class; null: all")
    shard: int = Field(1, ge=1, description="ranks sharing parameters and optimizer; 1: no sharing")
    expert_parallel: int = Field(
        1, ge=1, description="ranks that share the experts; tokens are sent to them: 1, or shard"
    )
    precision: Precision = Field("auto", description="auto: bfloat16 where a probe finds it faster")
    log_every: int = Field(20, ge=1, description="steps between two logged points")
    checkpoint_every: int = Field(100, ge=1, description="steps, rounded up to a logged point")

    def misfits(self, around: config.Surroundings) -> config.Misfits:
        if self.warmup_epochs > self.epochs:
            text = f"found {self.warmup_epochs:g}, but epochs is {self.epochs}"
            yield ("warmup_epochs",), f"{text}; allowed: 0 to {self.epochs}"
        for key, off in SETTINGS_NEEDING_CLASSES.items():
            value = getattr(self, key)
            if value and (why := around.lacks(key)):
                text = f"found {config.format_nondefaults(value)}, but {why} ({around.data})"
                yield (key,), f"{text}; allowed: {off}"
        for key, default in (("views", ViewSettings()), ("adversarial", None)):
            value = getattr(self, key)
            if around.is_text and value != default:
                text = f"found {config.format_nondefaults(value)}, but {around.data} is text"
                yield (key,), f"{text}; allowed: leave it out"
        if around.source is not None and around.source.sided and self.views.flip:
            text = f"found true, but in {around.data} left and right matter"
            yield ("views", "flip"), f"{text}; allowed: false"
        if around.preview is not None:
            yield from self.views.pixel_misfits(around)
            if around.preview.short_side is not None:
                if self.views.crop is None:
                    yield ("views", "crop"), f"found null, but in {around.data} {CROP_NEEDED}"
            elif self.views.shift >= min(around.preview.shape):
                size = f"images of {around.preview.size} pixels"
                text = f"found {self.views.shift}, but {around.data} has {size}"
                yield ("views", "shift"), f"{text}; allowed: less than that"
            yield from self._list_size_misfits(around)

    def _list_size_misfits(self, around: config.Surroundings) -> config.Misfits:
        """Yield (keys, message) if the batch or the shots per class exceed the number of images."""
        preview = around.preview
        if not preview.counts:
            return
        counts = preview.counts["train"]
        images = sum(counts)
        why = around.data
        shots = self.shots
        if shots is not None and preview.classes:
            if len(counts) > 1:
                class_sizes = [count for count in counts if count]
                smallest = min(class_sizes)
                name = f"class {preview.classes[counts.index(smallest)]}"
            else:  # in generated data the size of each class is not known yet
                class_sizes = [images // len(preview.classes)] * len(preview.classes)
                smallest = class_sizes[0]
                name = "a class"
            if shots > smallest:
                text = f"found {shots}, but {name} of {around.data} has {smallest} training images"
                yield ("shots",), f"{text}; allowed: 1 to {smallest}, or null"
                return
            images = shots * len(class_sizes)
            why = f"{shots} shots of {len(class_sizes)} classes"
        yield from large_batch_misfits(self, images, why)

    @field_validator("weight_decay")
    @classmethod
    def _check_weight_decay(cls, decay: float, info: ValidationInfo) -> float:
        optimizer = info.data.get("optimizer")
        if decay and optimizer is not None and not optimizer.decays:
            raise ValueError(
                f"found {decay:g} with optimizer.kind {optimizer.kind}, which has no decay; "
                "allowed: 0, or optimizer: {kind: adamw}"
            )
        return decay


class Finetuning(Training):
    """Fine-tuning: other data, other image size, other k, with or without the teacher."""

    k: int | None = Field(None, ge=1, description="experts per token; null: the method's")
    guided: bool = Field(False, description="keep the regularizers that need the teacher")

    def misfits(self, around: config.Surroundings) -> config.Misfits:
        if around.is_text:
            yield (), f"found a section, but {around.data} is text; allowed: leave it out"
        yield from super().misfits(around)


class AdversarialFinetuning(Finetuning):
    """Fine-tuning on attacked images only: the same settings, always with an attack."""

    adversarial: Adversarial = Field(Adversarial(), description="default: 10 steps of 8/255")


class TeacherRouterFit(config.Config):
    """Settings of the fit of a linear router on each aligned block of the frozen teacher."""

    def misfits(self, around: config.Surroundings) -> config.Misfits:
        if around.preview is not None and around.preview.counts:
            yield from large_batch_misfits(self, around.preview.image_counts["train"], around.data)

    steps: Annotated[int, Field(ge=1)] = 300
    batch: Annotated[int, Field(ge=1)] = 256
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3


def local_image_generators(generator: Generator, batch: Batch) -> Generator | list[Generator]:
    """Return ``generator``, or for several ranks one per local image, in its state on one rank."""
    ranks = rank_and_size()
    if ranks.size == 1:
        return generator
    states = []
    for _ in range(len(batch.images) * ranks.size):
        states.append(generator.get_state())
        torch.rand(batch.images.shape[1:], generator=generator)
    generators = []
    for index in streams.select_rank_rows(torch.arange(len(states)), batch.views).tolist():
        image_generator = Generator()
        image_generator.set_state(states[index])
        generators.append(image_generator)
    return generators


def build_optimizer(
    model: nn.Module, settings: Training, routers: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Build the fused optimizer; weight decay is on matrices, except a teacher's ``routers``."""
    # No decay on biases, norms, tokens, positions, experts' bases and routers' orthonormal rows;
    # separate losses control the lengths of bases and rows.
    bases = {id(row) for part in model.modules() for row in getattr(part, "orthonormal_rows", ())}
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or name.endswith(NO_DECAY_SUFFIXES) or id(parameter) in bases:
            undecayed.append(parameter)
        else:
            decayed.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
        {"params": list(routers), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return settings.optimizer.build(groups, settings.learning_rate)


def learning_rate(step: int, steps: int, warmup: float, settings: Training) -> float:
    """Return the learning rate at a step: linear over ``warmup`` steps, then a half cosine."""
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1.0, steps - warmup)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * (1 + math.cos(math.pi * share)) / 2
