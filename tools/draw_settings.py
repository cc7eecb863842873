"""Random settings out of the schema, small enough that a study of them runs in seconds.

A setting is drawn from its annotation, within its bounds. ``SMALL`` says what keeps a study small;
such settings are always written, the others now and then.
"""

import random
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moecore.core.config import KIND, Part, find_class, is_family_base, list_own_names

SHARE = 0.25  # of the settings that have a default, as many are written
NULL = 0.4  # of the settings that may be null, as many are

# By the name of a setting, or by its class and name
SMALL: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("width", "text.width"), (8, 16)),
    **dict.fromkeys(("epochs", "steps", "draws", "lemma_tokens", "explored"), (1, 2)),
    **dict.fromkeys(("images", "gallery", "calibration", "augmentation_images"), (4, 6)),
    "Lipschitz.images": (2,),
    "precision": ("float32", "float32", "bfloat16"),  # "auto" is timed
    **dict.fromkeys(("batch", "Calibrate.batch", "group"), (2, 4, 5)),
    **dict.fromkeys(("log_every", "checkpoint_every", "group_size"), (1, 2)),
    **dict.fromkeys(("learning_rate", "final_learning_rate"), (1e-3, 1e-2)),
    **dict.fromkeys(("subjects", "volumes", "rescans"), (2, 3)),
    "Calibrate.on_refusal": ("report",),
    "number": (2, 3, 4),
    "k": (1, 2),
    "blocks": ("all", "all", (0,)),
    "SwinSettings.patch": (2,),
    "depth": (1, 2, 3),
    "heads": (1, 2),
    "patch": (4,),
    "mlp_ratio": (1, 2),
    "hidden_ratio": (0.5, 1),
    "warmup_epochs": (0, 0.5, 1),
    "updates": (1, 2, 3),
    "rounds": (2,),
    "folds": (2,),
    "overlays": (0, 2),
    "joint": (4, 8),
    "Vit3d.patch": (16, 32),
    "Vit3d.pool": (4, 8),
    "Sfcn.channels": ((2, 3, 2), (2, 2, 3, 2)),
    "Sfcn.bins": (8,),
    "stem_width": (2,),
    "hidden": (4, 8),
    "span": (4, 8),
    "SwinSettings.depths": ((1, 1), (2,)),
    "window": (2, 3),
    "Corruptions.names": (("fog", "contrast"), ("jpeg_compression",)),
    "SweepSettings.k": ((1, 2), ()),
    "SweepSettings.threshold": ((0.3,), ()),
    "epsilons": ((0.05,), (0.0, 0.1)),
    "sigmas": ((0.1,),),
    "shots": ((1, 2),),
    "Finetuning.shots": (1, 2, None),
    "Retrieval.at": ((1, 2),),
    "windows": ((2,),),
    "CohortChecks.ages": ((20, 60),),
    "experts": (2, 4),
    "linear": ("linear",),
}
# Written, as the default takes long
# No part of a study that runs here: ranks, files, names
ALWAYS = ("audit", "sweeps", "generalisation", "Routing.augmentations")
LEFT_OUT = (
    *("shard", "expert_parallel", "root", "cache", "licence", "name", "context", "packages"),
    *("TextTowerSettings.moe", "pretrained_windows", "test_sites", "block"),
    *("Training.adversarial", "Method.model", "Method.pretrain", "guided_finetuning"),
    "unguided_regularizers",
)


class SettingsDrawer:
    """Draws settings; kinds: the parts of a family that may be drawn, of others all may be."""

    def __init__(self, seed: int | str, kinds: Mapping[type, Sequence[str]] | None = None) -> None:
        self.random = random.Random(seed)
        self.kinds = {} if kinds is None else kinds

    def draw_part(self, family: type[BaseModel], /, **fixed: Any) -> dict[str, Any]:
        """Return settings of some part of a family; fixed: those that are not drawn."""
        kind = self.random.choice(self.kinds.get(family) or list_own_names(family))
        return self.draw_settings(find_class(family, kind), **fixed)

    def draw_settings(self, model: type[BaseModel], /, **fixed: Any) -> dict[str, Any]:
        """Return settings of a class as plain data; not everything fits together."""
        drawn: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            names = _list_names(model, name)
            is_written = field.is_required() or is_part(field.annotation) or set(names) & set(SMALL)
            if name in fixed:
                drawn[name] = fixed[name]
            elif name == KIND:
                drawn[name] = field.default
            elif is_written or self._is_written(names):
                drawn[name] = self.draw_field(model, name)
        return drawn

    def draw_field(self, model: type[BaseModel], name: str) -> Any:
        """Return a value of a setting of a class."""
        for key in _list_names(model, name):
            if key in SMALL:
                return self.random.choice(SMALL[key])
        field = model.model_fields[name]
        return self.draw_value(field.annotation, field.metadata)

    def draw_value(self, annotation: Any, metadata: Sequence[Any] = ()) -> Any:
        """Return a value of an annotation; metadata: its bounds."""
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self.draw_value(inner[0], [*metadata, *_list_bounds(inner[1:])])
        if origin is Literal:
            return self.random.choice(inner)
        if origin in (Union, UnionType):
            others = [one for one in inner if one is not NoneType]
            if len(others) < len(inner) and self.random.random() < NULL:
                return None
            return self.draw_value(self.random.choice(others), metadata)
        if origin is tuple:
            return self._draw_tuple(inner)
        if annotation is bool:
            return self.random.random() < 0.5
        if annotation in (int, float):
            return self.random.choice(list_numbers(annotation, metadata))
        if is_part(annotation) and is_family_base(annotation):
            return self.draw_part(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self.draw_settings(annotation)
        return {} if origin is dict else "word"

    def _draw_tuple(self, inner: tuple[Any, ...]) -> list[Any]:
        number = self.random.choice((1, 1, 2)) if inner[-1] is Ellipsis else len(inner)
        of_each = [inner[0]] * number if inner[-1] is Ellipsis else inner
        values = [self.draw_value(one) for one in of_each]
        ordered = all(isinstance(value, int | float) for value in values)
        return sorted(values) if ordered else values

    def _is_written(self, names: Sequence[str]) -> bool:
        if set(names) & {*ALWAYS, *LEFT_OUT}:
            return bool(set(names) & set(ALWAYS))
        return self.random.random() < SHARE


def _list_names(model: type[BaseModel], name: str) -> list[str]:
    """Return the names that a setting has in SMALL, ALWAYS and LEFT_OUT."""
    return [*(f"{one.__name__}.{name}" for one in model.__mro__), name]


def is_part(annotation: Any) -> bool:
    """Return whether a setting is a part, whose kind must be written: a default is not tracked."""
    return isinstance(annotation, type) and issubclass(annotation, Part)


def list_numbers(kind: type, metadata: Sequence[Any]) -> list[Any]:
    """Return some small numbers within bounds, as pydantic keeps them in a field's metadata."""
    bounds = _list_bounds(metadata)
    low, is_open = 0, False
    for bound in bounds:
        if (above := getattr(bound, "gt", getattr(bound, "ge", None))) is not None:
            low, is_open = above, hasattr(bound, "gt")
    span = 4 if kind is int else 2.0
    for bound in bounds:
        if (below := getattr(bound, "lt", getattr(bound, "le", None))) is not None:
            span = min(span, (below - low) * (0.9 if hasattr(bound, "lt") else 1))
    shares = (0.25, 0.6, 1) if is_open else (0, 0.25, 0.6, 1)
    return sorted({kind(low + span * share) for share in shares})


def _list_bounds(metadata: Sequence[Any]) -> list[Any]:
    """Return the bounds of an annotation, also those inside of pydantic's own."""
    inner = [one.metadata if isinstance(one, FieldInfo) else [one] for one in metadata]
    return [bound for bounds in inner for bound in bounds]
