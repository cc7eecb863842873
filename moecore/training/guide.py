"""The frozen teacher and its routers: what guides a student's routing (TGR-MoE, §3.2)."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moecore.core.files import UserError
from moecore.core.routing_records import Feature, Guidance, ModelOutput, TokenLayout
from moecore.nn.backbones.base_model import BackboneModel, EncodeOptions, Model
from moecore.nn.predict import image_batches
from moecore.training.method import Method


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
        read = [teacher.depth - 1] * len(blocks) if features == "final" else blocks
        self.routers = nn.ParameterList(
            nn.init.trunc_normal_(torch.empty(experts, teacher.width_of(block)), std=0.02)
            for block in read
        )
        self.routers.requires_grad_(learns)

    def forward(self, images: Tensor) -> Guidance:
        # An attack on a GuidedModel needs gradients through the teacher; training does not.
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
        """Set the mode of the routers; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self


class GuidedModel(Model):
    """A student with the teacher that its router needs (TGR): ``guided(images)`` as any model."""

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
    """Return the model as it is used: alone, or with its teacher if its router needs one."""
    if model.moe is None or "teacher" not in model.moe.router.wants:
        return model
    if guide is None:
        raise UserError(
            f"router.kind {model.moe.router.kind} needs a teacher, which is missing; set a "
            "teacher: section other than no_teacher"
        )
    return GuidedModel(model, guide)


def aligned_teacher_blocks(
    student: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the teacher's blocks at the same relative depth of a stage as the student's."""
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


def build_guide(teacher: BackboneModel, method: Method, stages: tuple[int, ...]) -> Guide:
    """Return ``teacher`` with random routers for ``method``; stages: student's blocks per stage."""
    moe = method.moe
    if moe is None or not method.guided_routing:  # no routers: the tokens may differ
        return Guide(teacher, (), 0, method.teacher_router.features)
    blocks = aligned_teacher_blocks(moe.indices(sum(stages)), stages, teacher.config.stages)
    return Guide(teacher, blocks, moe.experts.choices, method.teacher_router.features, method.joint)


def teacher_probs(guide: Guide | None, images: np.ndarray, batch: int, device: str) -> list[Tensor]:
    """Return the teacher routers' probabilities (N, T, E) per MoE layer; [] without a teacher."""
    if guide is None or not guide.blocks:
        return []
    chunks = [
        tuple(probs.cpu() for probs in guide.to(device)(pixels).probs)
        for pixels in image_batches(images, batch, device)
    ]
    return [torch.cat(layer) for layer in zip(*chunks, strict=True)]
