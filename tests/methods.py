"""Methods of tests/params.yaml, and untrained small models of each, without near ties."""

import torch
from torch import nn

from moecore.core.source_layout import ROOT
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.study.yaml_document import load_yaml_document
from moecore.training.method import Method, attach_required_guide, initialise_guide
from tests.training.small import IMAGE


def load_methods(path: str) -> dict[str, Method]:
    entries = load_yaml_document(str(ROOT / path)).data["methods"]
    return {name: Method.model_validate(entry) for name, entry in entries.items()}


METHODS = load_methods("tests/params.yaml")
# Every kind of plan, a guided one, and one whose loss reads pairs of views
REPRESENTATIVE = ("prc_moge", "ermoe", "tgr", "stable_moe", "expert_choice", "soft_moe")


# layer → the first method that has it
ROUTED = {each.moe.model_dump_json(): name for name, each in reversed(METHODS.items()) if each.moe}
KINDS = tuple(reversed(ROUTED.values()))


def tiny(name: str, image: ImageSpec = IMAGE) -> nn.Module:
    """An untrained model of the method (with its teacher), 16 patches and two MoE layers."""
    method, patch = METHODS[name], image.size // 4
    torch.manual_seed(0)
    model = Vit(patch=patch, width=32, depth=4, heads=2).build(image, method.moe)
    guide = None
    if method.guided:
        teacher = Vit(patch=patch, width=32, depth=2, heads=2).build(image)
        guide = initialise_guide(teacher, method, (4,))
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *(guide.named_parameters() if guide else ())]:
            if "router" in key and "basis" not in key:
                value *= 30
            if "attn" in key or "patch_embed" in key:
                value *= 5
    return attach_required_guide(model, guide).eval()


def relabelled(name: str, order: torch.Tensor) -> nn.Module:
    """``tiny(name)`` whose expert ``order[i]`` is now i; it computes the same."""
    model, experts = tiny(name), len(order)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "router" not in key and "experts" not in key:
                continue
            axis = next((axis for axis, size in enumerate(weight.shape) if size == experts), None)
            if axis is not None:
                weight.copy_(weight.index_select(axis, order))
    return model
