"""The frozen teacher and its routers: what guides a student's routing (TGR-MoE, §3.2)."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moecore.artifacts import load_model, save_model, transferred
from moecore.files import StageError, read_json, write_json
from moecore.records import Feature, Guidance
from moecore.regularizers.importance import importance
from moecore.tensors import read_tensors, write_tensors
from moecore.training.method import Method, TeacherRouter


class Guide(nn.Module):
    """A dense teacher with one linear router (no bias) per MoE layer of the student.

    ``guide(images)`` with images (B, C, H, W) in [0, 1] returns Guidance(prediction (B, K), probs per layer (B, T, E)).
    """

    def __init__(self, teacher: nn.Module, blocks: tuple[int, ...], experts: int, features: Feature) -> None:
        super().__init__()
        self.teacher = teacher.eval().requires_grad_(False)
        self.blocks, self.experts, self.features = blocks, experts, features
        width = teacher.config.width
        self.routers = nn.ParameterList(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02) for _ in blocks)

    def forward(self, images: Tensor) -> Guidance:
        with torch.no_grad():
            tokens, _, features = self.teacher.encode(images, self.features, self.blocks)
            prediction = self.teacher.predict(tokens)
        return Guidance(prediction, tuple(self.route(layer, feature) for layer, feature in enumerate(features)))

    def route(self, layer: int, features: Tensor) -> Tensor:
        """Probabilities (B, T, E) of the teacher's router at an MoE layer; fp32 whatever the autocast dtype."""
        with torch.autocast(features.device.type, enabled=False):
            return torch.softmax(linear(features.float(), self.routers[layer].float()), dim=-1)


def aligned_blocks(student: tuple[int, ...], student_depth: int, teacher_depth: int) -> tuple[int, ...]:
    """The teacher's blocks at the same relative depth as the student's (indices from 0; equal where the depths are)."""
    return tuple(round((index + 1) * teacher_depth / student_depth) - 1 for index in student)


def build_guide(teacher: nn.Module, method: Method, depth: int) -> Guide:
    """The unfitted guide of a guided ``method`` whose student has ``depth`` blocks."""
    moe = method.moe
    if moe is None:
        raise StageError("a dense method has no router to guide; remove the regularizer that needs the teacher")
    blocks = aligned_blocks(moe.indices(depth), depth, teacher.config.depth)
    return Guide(teacher, blocks, moe.experts.number, method.teacher_router.features)


def teacher_router_loss(probs: tuple[Tensor, ...], settings: TeacherRouter) -> dict[str, Tensor]:
    """The unweighted terms of the teacher router's loss, summed over layers (eq. 8): balance and mean token entropy (nats)."""
    entropy = [-(p * torch.log(p.clamp_min(1e-12))).sum(dim=-1).mean() for p in probs]
    return {"load": sum(importance(probs=p) for p in probs), "entropy": sum(entropy)}


def save_guide(folder: Path, guide: Guide) -> None:
    """Write the teacher, its routers and their settings into ``folder``."""
    save_model(folder / "teacher", guide.teacher)
    write_tensors(folder / "routers.safetensors", {str(layer): weight for layer, weight in enumerate(guide.routers)})
    write_json(folder / "guide.json", {"needed": True, "blocks": list(guide.blocks), "experts": guide.experts, "features": guide.features})


def save_no_guide(folder: Path) -> None:
    """Say that the method needs no teacher. The file never changes, so a new teacher leaves such methods up to date."""
    write_json(folder / "guide.json", {"needed": False})


def load_guide(folder: str | Path, size: int | None = None) -> Guide | None:
    """The frozen guide of ``folder``, or None for a method that needs none; ``size`` asks for another image size."""
    settings = read_json(Path(folder) / "guide.json")
    if not settings["needed"]:
        return None
    teacher = load_model(Path(folder) / "teacher")
    if size is not None and size != teacher.image.size:
        teacher = transferred(Path(folder) / "teacher", teacher.image.model_copy(update={"size": size}), None)
    guide = Guide(teacher, tuple(settings["blocks"]), settings["experts"], settings["features"])
    weights, _ = read_tensors(Path(folder) / "routers.safetensors")
    for layer, weight in enumerate(guide.routers):
        weight.data.copy_(weights[str(layer)])
    return guide.requires_grad_(False).eval()
