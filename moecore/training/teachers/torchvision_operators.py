"""The one place that makes torchvision importable next to a CPU build of torch.

torchvision's wheels carry CUDA operators. Next to a CPU-only torch its library does not load, and
its import then fails because fake implementations are registered for operators that were never
defined. Defining the schemas of the two is enough for timm, which uses neither.
"""

import torch

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_definitions: list[torch.library.Library] = []


def define_missing_operators() -> None:
    """Define torchvision's operators where a CPU build of torch lacks their schemas."""
    if torch.version.cuda is not None or _definitions:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _definitions.append(library)
