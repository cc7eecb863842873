"""Sparse mixture-of-experts models, their training, and what the papers measure.

What ``__all__`` lists is public (docs/api.md); everything else may change. None of it is imported
before it is used: ``import moecore`` loads no torch.
"""

from typing import TYPE_CHECKING, Any

__all__ = [
    "MoELayer",
    "ModelOutput",
    "Prepared",
    "RoutingRecord",
    "Target",
    "UserError",
    "__version__",
    "attacks",
    "backbones",
    "expert_agreement",
    "expert_counts",
    "experts",
    "lens",
    "load_cv2",
    "load_model",
    "measure",
    "model_folder",
    "pages",
    "parts",
    "predict_in_batches",
    "regularizers",
    "routers",
    "routing_loss",
    "testing",
    "trace",
    "upcycle",
    "update_routers",
]

RENAMED: dict[str, str] = {}  # a public name of the last minor version → its new one


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from moecore.face import *

    __version__: str
else:  # where a type checker does not see it, it names what is not public

    def __getattr__(name: str) -> Any:
        if name in RENAMED:
            import warnings

            text = f"moecore.{name} is now moecore.{RENAMED[name]}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            name = RENAMED[name]
        if name not in __all__:
            raise AttributeError(f"module 'moecore' has no attribute {name!r}")
        if name == "__version__":
            from importlib.metadata import version

            return version("moecore")
        from moecore import face

        return getattr(face, name)
