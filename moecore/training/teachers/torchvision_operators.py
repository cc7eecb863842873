"""Make torchvision importable beside a CPU build of torch.

Its wheels carry CUDA operators. Beside a CPU-only torch their library does not load, and the import
fails where it registers fake implementations of operators that were never defined. With the schemas
of two defined it works; timm uses neither.
"""

from functools import cache

import torch


@cache
def define_missing_operators() -> torch.library.Library | None:
    """Define the schemas where torch is a CPU build; return what keeps them defined."""
    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
