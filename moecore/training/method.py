"""Settings of a method (an entry of ``methods:``): routers, experts, losses and the teacher.

A guide is the frozen teacher and its routers, from which a student learns (TGR-MoE, §3.2).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear

from moecore.core import config, files
from moecore.core.routing_records import Feature, Guidance, ModelOutput, TokenLayout
from moecore.nn.backbones.base_model import Backbone, BackboneModel, EncodeOptions, Model
from moecore.nn.backbones.two_towers import TextTowerSettings
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import Blocks, MoESettings
from moecore.nn.predict import image_batches
from moecore.nn.routers.base import Router
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.region_routing import RegionExpertSettings, RegionRouting
from moecore.training.regularizers.teacher_router import TeacherRouter as TeacherRouterLoss
from moecore.training.upcycling_kinds import Granular, Upcycling


class TowerRouting(config.Config):
    """Router and experts of one tower; both None for a dense tower."""

    router: Router | None = None
    experts: Experts | None = None
    blocks: Blocks = "last_2"

    @property
    def moe(self) -> MoESettings | None:
        """Settings of the tower's MoE layers; None for a dense tower."""
        if self.router is None or self.experts is None:
            return None
        return MoESettings(router=self.router, experts=self.experts, blocks=self.blocks)

    @property
    def provided(self) -> frozenset[str]:
        """Names of the quantities that router and experts provide for regularizers."""
        if self.router is None or self.experts is None:
            return frozenset()
        return self.router.provides | self.experts.provides | {"routing"}


class TextTowerMethod(TowerRouting):
    """Settings of a text tower: router, experts, regularizers, and when it is frozen."""

    blocks: Blocks = Field("last_2", description="blocks of the text tower that hold experts")
    regularizers: tuple[Regularizer, ...] = Field(
        (), description="on the routing of captions; not those that need views or a teacher"
    )
    frozen: Literal["never", "finetune", "always"] | None = Field(
        None, description="when the text tower's weights do not change; null: as in `model.text`"
    )

    @model_validator(mode="after")
    def _check_tower(self) -> "TextTowerMethod":
        if (self.router is None) != (self.experts is None):
            raise ValueError("text has both `router` and `experts`, or neither (a dense tower)")
        for regularizer in self.regularizers:
            if lacking := sorted(regularizer.needs - {"routing", "load"}):
                raise ValueError(
                    f"text.regularizers: {regularizer.kind} needs {', '.join(lacking)}, which "
                    "captions do not have"
                )
            if getattr(regularizer, "level", "batch") != "batch":
                raise ValueError(
                    "text.regularizers: a step's captions are routed together; allowed: level: "
                    "batch"
                )
        balance = getattr(self.router, "balance", None)
        if balance is not None and balance.kind == "quantile":
            raise ValueError(
                "text.router.balance: found quantile, which takes equally many tokens from all "
                "ranks; allowed: loss_free, sinkhorn"
            )
        if self.regularizers and self.router is None:
            raise ValueError("text.regularizers: a dense text tower routes nothing; leave them out")
        return self

    def surround(self, around: config.Surroundings) -> config.Surroundings:
        if self.router is None:
            return config.Surroundings()
        losses = self.regularizers
        return config.Surroundings(self.router, self.experts, losses=losses, provided=self.provided)

    def misfits(self, around: config.Surroundings) -> config.Misfits:
        yield from list_loss_misfits(self.router, "regularizers", self.regularizers)


def list_loss_misfits(
    router: Router | None, key: str, losses: Sequence[Regularizer], before: Sequence[str] = ()
) -> config.Misfits:
    """Yield misfits of list ``key``: a kind twice or in ``before``, or no ``router.own_loss``."""
    kinds = list(before)
    for index, loss in enumerate(losses):
        if loss.kind in kinds:
            yield (key, index), f"found {loss.kind} a second time; allowed: each kind once"
        kinds.append(loss.kind)
    if router is None or router.own_loss is None:
        return
    if not any(loss.kind == router.own_loss and loss.weight for loss in losses):
        text = f"found no {router.own_loss}, without which the router {router.kind} does not work"
        yield (key,), f"{text}; allowed: {router.own_loss} with a weight above 0"


class TeacherRouterSettings(config.Config):
    """Settings of the router on the frozen teacher's features (TGR-MoE, §3.2)."""

    features: Feature = Field("mlp_input", description="where the teacher's features are read")
    load: float = Field(0.005, ge=0, description="weight of the CV² of experts' mean probability")
    entropy: float = Field(0.005, ge=0, description="weight of the mean token entropy")
    fit: Literal["fitted", "joint"] = Field(
        "fitted", description="by the stage teacher_router, or jointly while pretraining"
    )


class Method(TowerRouting):
    """A routing method. Without ``router`` and ``experts`` it is a dense model."""

    blocks: Blocks = Field("last_2", description="MoE: every_2, last_2, all, or indices from 0")
    regularizers: tuple[Regularizer, ...] = ()
    unguided_regularizers: tuple[Regularizer, ...] = Field(
        (), description="in fine-tuning without the teacher, instead of those that need it"
    )
    teacher_router: TeacherRouterSettings = TeacherRouterSettings()
    distillation: float = Field(0.0, ge=0, lt=1, description="share of the loss, hard as in DeiT")
    guided_finetuning: bool | None = Field(
        None, description="fine-tune with the teacher; null: as `guided` of that phase says"
    )
    upcycle: Upcycling = Field(
        False,
        description="start from the teacher's weights, MLPs copied into experts; granular: cut "
        "into several experts each; drop: copies with some hidden units drawn again",
    )
    regions: RegionExpertSettings | None = Field(None, description="region experts (tissue maps)")
    permuted: bool = Field(False, description="null control: training labels are permuted")
    model: dict[str, int | float | str] = Field({}, description="changes to `model`: {width: 128}")
    text: TextTowerMethod | None = Field(None, description="of a two-tower model; null: dense")
    pretrain: dict[str, int | float | dict[str, float]] = Field(
        {}, description="changes to the section: {learning_rate: 7.0e-4}"
    )

    @model_validator(mode="after")
    def _check_experts(self) -> "Method":
        if (self.router is None) != (self.experts is None):
            raise ValueError("a method has both `router` and `experts`, or neither (a dense model)")
        if self.regions is None:
            return self
        if self.experts is None:
            raise ValueError(
                "regions: a dense model has no experts to assign; give the method a router and "
                "experts, or leave out regions"
            )
        assigned = len(self.regions.experts)
        number = self.experts.choices
        if assigned > number:
            raise ValueError(f"regions.experts: found {assigned}; allowed: at most {number}")
        return self

    def surround(self, around: config.Surroundings) -> config.Surroundings:
        return around._replace(
            router=self.router,
            experts=self.experts,
            losses=self.losses,
            provided=self.provided | {"guidance", "two_views", "truth"},
        )

    def misfits(self, around: config.Surroundings) -> config.Misfits:
        remaining = [loss.kind for loss in self.regularizers if "guidance" not in loss.needs]
        yield from list_loss_misfits(self.router, "regularizers", self.regularizers)
        unguided = self.unguided_regularizers
        yield from list_loss_misfits(None, "unguided_regularizers", unguided, remaining)
        for index, loss in enumerate(unguided):
            if "guidance" in loss.needs:
                text = f"found {loss.kind}, which needs a teacher; allowed: others"
                yield ("unguided_regularizers", index), text
        if self.guided_finetuning and not self.guided:
            text = "found true, but nothing of the method needs a teacher; allowed: false, null, or"
            yield ("guided_finetuning",), f"{text} router_kl, distillation, or teacher_routed"
        if self.unguided_regularizers and not self.guided_routing:
            text = "found some, but no loss of the method needs a teacher, so none is replaced"
            yield ("unguided_regularizers",), f"{text}; allowed: []"
        if "teacher_router" in self.model_fields_set and not self.guided_routing:
            text = "found one, but nothing of the method is guided by a teacher's router"
            allowed = "leave it out, or the regularizer router_kl or the router teacher_routed"
            yield ("teacher_router",), f"{text}; allowed: {allowed}"
        yield from self._idle_upcycling()
        if self.distillation and (reason := around.lacks("distillation")):
            text = f"found {self.distillation:g}, but a teacher's decision cannot be learned"
            yield ("distillation",), f"{text}: {reason} ({around.data}); allowed: 0"
        if around.is_text and (self.views == 2 or self.guided or self.upcycle):
            text = f"found a method that needs two views or a teacher, and {around.data} is text"
            yield (), f"{text}; allowed: another method"
        if around.is_text and self.permuted:
            text = f"found true, but the label of a word is the next one ({around.data} is text)"
            yield ("permuted",), f"{text}; allowed: false"

    def _idle_upcycling(self) -> config.Misfits:
        """Yield (keys, message) if upcycling is impossible or makes other settings ineffective."""
        if self.experts is None or self.router is None:
            if isinstance(self.upcycle, config.Config):
                text = f"found {self.upcycle.kind}, but a dense method has no experts"
                yield ("upcycle", "kind"), f"{text}; allowed: true, false"
            return
        if isinstance(self.upcycle, Granular):
            yield from self.upcycle.list_settings_parting_pieces(self.router, self.experts)
        if self.upcycle:
            why = "the experts begin as the teacher's MLPs"
            names = self.experts.start_settings
            for keys, text in config.list_idle_misfits(self.experts, names, why, "upcycle: false"):
                yield ("experts", *keys), text

    @property
    def isolates_tissues(self) -> bool:
        """True if some volumes are reduced to one tissue in training."""
        regions = self.regions
        return regions is not None and (regions.warm_start_epochs > 0 or regions.isolated > 0)

    @property
    def expert_names(self) -> tuple[str, ...]:
        """Names of the experts: tissues, then free_<index>; without ``regions``, expert_<index>."""
        number = 0 if self.experts is None else self.experts.choices
        if self.regions is None:
            return tuple(f"expert_{index}" for index in range(number))
        free = range(len(self.regions.experts), number)
        return (*self.regions.experts, *(f"free_{index}" for index in free))

    def merge_model_settings(self, model: config.AnySettings) -> config.AnySettings:
        """Return the section ``model`` with this method's changes; UserError for unknown keys."""
        sized = config.replace_and_validate("model", model, self.model, Backbone)
        if (part := self.text) is None:
            return sized
        tower = getattr(sized, "text", None)
        if not isinstance(tower, TextTowerSettings):
            raise files.UserError("text: no text tower; allowed: null, or model.kind: two_towers")
        changed = tower.model_copy(update={"moe": part.moe, "frozen": part.frozen or tower.frozen})
        return sized.model_copy(update={"text": changed})

    def merge_pretrain_settings(self, settings: config.AnySettings) -> config.AnySettings:
        return config.replace_and_validate("pretrain", settings, self.pretrain)

    @property
    def routed_by_teacher(self) -> bool:
        """True if the router needs the teacher for every image, also after training."""
        return self.router is not None and "teacher" in self.router.wants

    @property
    def guided_routing(self) -> bool:
        return self.routed_by_teacher or any("guidance" in loss.needs for loss in self.regularizers)

    @property
    def guided(self) -> bool:
        """True if training needs the teacher at every step."""
        return self.guided_routing or self.distillation > 0

    @property
    def joint(self) -> bool:
        return self.guided_routing and self.teacher_router.fit == "joint"

    @property
    def losses(self) -> tuple[Regularizer, ...]:
        """All regularizers, including those that ``teacher_router`` and ``regions`` add."""
        losses: list[Regularizer] = list(self.regularizers)
        if self.joint:
            router = self.teacher_router
            losses.append(TeacherRouterLoss(balance=router.load, entropy=router.entropy))
        if self.isolates_tissues:
            losses.append(RegionRouting())
        return tuple(losses)

    @property
    def text_losses(self) -> tuple[Regularizer, ...]:
        return () if self.text is None else self.text.regularizers

    @property
    def views(self) -> int:
        return 1 + any("two_views" in regularizer.needs for regularizer in self.regularizers)

    def for_finetuning(self, k: int | None, guided: bool, same_classes: bool = False) -> "Method":
        """Adapt to fine-tuning: ``k`` if set; teacher if ``guided``; no upcycling, no regions."""
        # ``guided_finetuning`` or ``guided``: whether losses that need a teacher are kept, not
        # replaced by ``unguided_regularizers``; hard distillation also needs the ``same_classes``.
        if self.guided_finetuning is not None:
            guided = self.guided_finetuning
        losses = self.regularizers
        if not guided:
            losses = tuple(loss for loss in losses if "guidance" not in loss.needs)
            losses += self.unguided_regularizers
        share = self.distillation if guided and same_classes else 0.0
        router = None if self.router is None else self.router.for_finetuning()
        if router is not None and k is not None:
            router = config.validate_again(router.with_k(k), f"finetune.k: found {k}, refused")
        return self.model_copy(
            update={
                "regularizers": losses,
                "router": router,
                "distillation": share,
                "upcycle": False,
                "regions": None,
            }
        )


# ``guide(images)`` with images (B, C, H, W) in [0, 1] returns Guidance(prediction (B, K), probs per
# layer (B, T, E)). blocks: of the teacher, whose features the routers read. If it ``learns``, its
# routers are trained together with the student.
class Guide(nn.Module):
    """A frozen dense teacher with one linear router (no bias) per MoE layer of the student."""

    def __init__(
        self,
        teacher: BackboneModel,
        blocks: tuple[int, ...],
        experts: int,
        features: Feature,
        learns: bool = False,
    ) -> None:
        super().__init__()
        self.teacher = teacher.eval().requires_grad_(False)
        self.blocks = blocks
        self.experts = experts
        self.features = features
        self.learns = learns
        read_blocks = [teacher.depth - 1] * len(blocks) if features == "final" else blocks
        self.routers = nn.ParameterList(
            nn.init.trunc_normal_(torch.empty(experts, teacher.width_of(block)), std=0.02)
            for block in read_blocks
        )
        self.routers.requires_grad_(learns)

    def forward(self, images: Tensor) -> Guidance:
        # An attack on a TeacherRoutedModel needs gradients through the teacher; training does not.
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            encoded = self.teacher.encode(images, EncodeOptions(self.features, self.blocks))
            prediction = self.teacher.predict(encoded.tokens)
        probs = tuple(self.route(layer, feature) for layer, feature in enumerate(encoded.features))
        return Guidance(prediction, probs)

    def route(self, layer: int, features: Tensor) -> Tensor:
        """Return probabilities (B, T, E) of the teacher's router at an MoE layer, in fp32."""
        with torch.autocast(features.device.type, enabled=False):
            return torch.softmax(linear(features.float(), self.routers[layer].float()), dim=-1)

    def train(self, mode: bool = True) -> "Guide":
        """Set the routers' mode; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self


class TeacherRoutedModel(Model):
    """A student combined with the teacher that its router needs (TGR); called as any model."""

    def __init__(self, model: BackboneModel, guide: Guide) -> None:
        super().__init__(model.config, model.image, model.moe)
        self.model = model
        self.guide = guide

    @property
    def layout(self) -> TokenLayout:
        return self.model.layout

    def layout_of(self, block: int) -> TokenLayout:
        return self.model.layout_of(block)

    @property
    # A property: as a submodule the head would be saved twice.  # pyrefly: ignore[bad-override]
    def head(self) -> nn.Module:
        return self.model.head

    def targets(self, labels: Tensor) -> Tensor:
        return self.model.targets(labels)

    def forward(self, images: Tensor) -> ModelOutput:
        return self.model(images, self.guide(images))


def attach_required_guide(model: BackboneModel, guide: Guide | None) -> Model:
    """Return the model, combined with its teacher if its router needs the teacher."""
    if model.moe is None or "teacher" not in model.moe.router.wants:
        return model
    if guide is None:
        raise files.UserError(
            f"router.kind {model.moe.router.kind} needs a teacher, which is missing; set a "
            "teacher: section other than no_teacher"
        )
    return TeacherRoutedModel(model, guide)


def aligned_teacher_blocks(
    student: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the teacher's block at the relative depth of each MoE block of ``student``."""
    # ours, theirs: blocks per stage of student and teacher. −1 without a counterpart: the teacher
    # is too shallow, or has other stages.
    if len(ours) != len(theirs):
        return (-1,) * len(student)
    aligned = []
    for stage, (depth, teacher_depth) in enumerate(zip(ours, theirs, strict=True)):
        for index in range(depth):
            block = round((index + 1) * teacher_depth / depth) - 1
            aligned.append(-1 if block < 0 else sum(theirs[:stage]) + block)
    return tuple(aligned[index] for index in student)


def initialise_guide(teacher: BackboneModel, method: Method, stages: tuple[int, ...]) -> Guide:
    """Combine ``teacher`` with random routers for a student with ``stages`` blocks per stage."""
    moe = method.moe
    if moe is None or not method.guided_routing:  # no routers: the tokens may differ
        return Guide(teacher, (), 0, method.teacher_router.features)
    blocks = aligned_teacher_blocks(moe.indices(sum(stages)), stages, teacher.config.stages)
    return Guide(teacher, blocks, moe.experts.choices, method.teacher_router.features, method.joint)


def teacher_probs(guide: Guide | None, images: np.ndarray, batch: int, device: str) -> list[Tensor]:
    """Return the teacher's routing probabilities (N, T, E) per MoE layer; [] without a teacher."""
    if guide is None or not guide.blocks:
        return []
    chunks = [
        tuple(probs.cpu() for probs in guide.to(device)(pixels).probs)
        for pixels in image_batches(images, batch, device)
    ]
    return [torch.cat(layer) for layer in zip(*chunks, strict=True)]
