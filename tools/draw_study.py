"""A random study of images, volumes, text, or images with captions: every section of params.yaml.

``SettingsDrawer`` draws a setting from its annotation, within its bounds. ``SMALL`` keeps a study
small; such settings are always written, the others now and then. Data are small: 24 to 60 images,
drawn or out of the files that ``write_raw_data`` writes.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np
from PIL import Image
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moecore.core.config import KIND, Part, builtin_kinds, find_class, is_family_base
from moecore.data.views.random_views import ViewSettings
from moecore.measure.base import builtin_measurements
from moecore.measure.calibrators.base import Calibrator
from moecore.nn.backbones.base_model import Backbone
from moecore.nn.experts.base import Experts
from moecore.nn.routers.base import Router
from moecore.study.stages import PHASES, REDUCING_PHASES
from moecore.study.study import MEASURED_SECTIONS, Study
from moecore.training.method import Method, TextTowerMethod
from moecore.training.regularizers.base import Regularizer
from moecore.training.settings import Training
from moecore.training.teachers.dense import Dense

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
    """Draws settings; kinds: family → parts that may be drawn, by default all of them."""

    def __init__(self, seed: int | str, kinds: Mapping[type, Sequence[str]] | None = None) -> None:
        self.random = random.Random(seed)
        self.kinds = {} if kinds is None else kinds

    def draw_part(self, family: type[BaseModel], /, **fixed: Any) -> dict[str, Any]:
        """Draw settings of a random part of a family; fixed: settings with given values."""
        kind = self.random.choice(self.kinds.get(family) or builtin_kinds(family))
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
        """Draw a value for the setting ``name`` of a class."""
        for key in _list_names(model, name):
            if key in SMALL:
                return self.random.choice(SMALL[key])
        field = model.model_fields[name]
        return self.draw_value(field.annotation, field.metadata)

    def draw_value(self, annotation: Any, metadata: Sequence[Any] = ()) -> Any:
        """Draw a value of an annotation; metadata: its bounds."""
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self.draw_value(inner[0], [*metadata, *_list_bounds(inner[1:])])
        if origin is Literal:
            return self.random.choice(inner)
        if origin in (Union, UnionType):
            others = [option for option in inner if option is not NoneType]
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
        values = [self.draw_value(annotation) for annotation in of_each]
        ordered = all(isinstance(value, int | float) for value in values)
        return sorted(values) if ordered else values

    def _is_written(self, names: Sequence[str]) -> bool:
        if set(names) & {*ALWAYS, *LEFT_OUT}:
            return bool(set(names) & set(ALWAYS))
        return self.random.random() < SHARE


def _list_names(model: type[BaseModel], name: str) -> list[str]:
    """Return the names that a setting has in SMALL, ALWAYS and LEFT_OUT."""
    return [*(f"{base.__name__}.{name}" for base in model.__mro__), name]


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


COMPANIONS = {  # of a router, the loss without which it does little or is refused
    "relu": "adaptive_l1",
    "dynamic": "diversity_simplicity",
    "teacher_routed": "router_kl",
}
COUNTS = {"train": 100, "validation": 100, "test": 100}  # each of ten classes is in every split
FLAT = ("vit", "vit", "vit", "swin", "swin_moe", "swin_v2", "single_layer")
FLAT_WITH_CLASSES = [name for name, one in builtin_measurements().items() if one.flat_classes]
PLAIN = (*FLAT_WITH_CLASSES, "zero_shot", "retrieval", "cohort_checks", "word_swaps")
CHANCES = {  # of the sections that a study may be without
    "teacher_router": 1,
    "finetune": 0.5,
    "adversarial": 0.2,
    "prune": 0.25,
    "merge": 0.25,
    "monitor": 0.3,
    "calibrate": 0.6,
    "robustness": 0.4,
    "transfer": 0.2,
    "routing": 0.7,
    "out_of_fold": 0.5,
}


class World(NamedTuple):
    """What a study is about, how often, which parts it may have and which sections not."""

    share: float
    backbones: tuple[str, ...]
    calibrators: tuple[str, ...]
    without: tuple[str, ...]


WORLDS = {
    "images": World(6, FLAT, ("temperature",), (*PLAIN[-4:], "out_of_fold")),
    "volumes": World(1, ("vit3d", "sfcn"), ("linear", "gap_on_age"), PLAIN[:-2]),
    "text": World(
        1.5,
        ("language_model",),
        ("temperature",),
        (*PLAIN[:-1], "out_of_fold", "robustness", "transfer", "finetune", "adversarial"),
    ),
    "captions": World(1.5, ("two_towers",), (), (*FLAT_WITH_CLASSES, "out_of_fold", "calibrate")),
}


class StudyDrawer(SettingsDrawer):
    """Draws the whole params.yaml of one seed; raw: the folder of ``write_raw_data``."""

    def __init__(self, seed: int, raw: Path) -> None:
        super().__init__(seed)
        self.raw = raw
        shares = [world.share for world in WORLDS.values()]
        self.channels = self.random.choice((1, 1, 3))
        self.name = self.random.choices(list(WORLDS), shares)[0]
        self.world = WORLDS[self.name]
        self.kinds = {
            Calibrator: self.world.calibrators,
            Router: [kind for kind in builtin_kinds(Router) if kind != "folded"],
        }

    def draw_study(self) -> dict[str, Any]:
        """Return the study as plain data."""
        model, source = self.draw_model(self.world.backbones), self.draw_source()
        methods = {f"m{index}": self.draw_method() for index in range(self.random.choice((2, 3)))}
        is_same = self.is_drawn(0.7) or any(method.get("upcycle") for method in methods.values())
        teacher = model if is_same else self.draw_model(self.world.backbones)
        study: dict[str, Any] = {
            "data": {"pretrain": source},
            "model": model,
            "methods": methods,
            "teacher": self._draw_teacher(teacher),
            "pretrain": self.draw_settings(Training),
        }
        measured = self.random.sample(MEASURED_SECTIONS, self.random.choice((0, 1, 2, 3)))
        asked = [name for name, chance in CHANCES.items() if self.is_drawn(chance)]
        drawn = [name for name in (*asked, *measured) if name not in self.world.without]
        for name in drawn:
            section, *_ = get_args(Study.model_fields[name].annotation)
            study[name] = self.draw_value(section)
            if name == "zero_shot":
                study[name]["source"] = {"kind": "digits", "size": source["source"]["size"] * 2}
        phases = ["pretrain"]
        for name in PHASES[1:]:
            if name in study:
                same = name in REDUCING_PHASES or self.is_drawn(0.3)
                study["data"][name] = source if same else self.draw_source()
                phases.append(name)
        run = {"methods": list(methods), "seeds": self.random.choice(([0], [0], [0, 1]))}
        run |= {"phases": phases, "measurements": [name for name in measured if name in study]}
        return {"run": run | {"thorough": phases}, **study}

    def is_drawn(self, chance: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < chance

    def draw_settings(self, model: type[BaseModel], /, **fixed: Any) -> dict[str, Any]:
        """Return settings of a class; views are of the study's world and mostly do something."""
        if issubclass(model, ViewSettings) and self.name == "text":
            return {}
        if issubclass(model, ViewSettings) and self.name == "volumes":
            return {"shift": 1, "flip": self.is_drawn(0.5)}
        drawn = super().draw_settings(model, **fixed)
        if issubclass(model, ViewSettings) and (self.channels == 3 or self.is_drawn(0.8)):
            drawn["crop"] = {"scale": [0.5, 1.0]}
        return drawn

    def _draw_teacher(self, model: dict[str, Any]) -> dict[str, Any]:
        if self.is_drawn(0.2):
            return {"kind": "no_teacher"}
        return self.draw_settings(Dense, model=model, data=None)

    def draw_model(self, kinds: tuple[str, ...]) -> dict[str, Any]:
        """Return a backbone of one of these kinds."""
        kind, fixed = self.random.choice(kinds), {}
        if kind.startswith("swin"):
            fixed["depths"] = self.random.choice(([1, 1], [2], [1, 2]))
            fixed["heads"] = [self.random.choice((1, 2)) for _ in fixed["depths"]]
        if kind == "two_towers":
            fixed["image"] = self.draw_model(FLAT[:-1])
        return self.draw_settings(find_class(Backbone, kind), **fixed)

    def draw_method(self) -> dict[str, Any]:
        """Return an entry of ``methods``, a dense one among eight."""
        fixed: dict[str, Any] = self._draw_routing() if self.is_drawn(0.88) else {}
        fixed |= {"upcycle": self.is_drawn(0.1), "model": {}, "pretrain": {}, "text": None}
        fixed |= {"regions": None, "teacher_router": {}}
        if self.name == "captions" and self.is_drawn(0.5):
            fixed["text"] = self.draw_settings(TextTowerMethod, **self._draw_routing())
        if self.name == "volumes" and fixed.get("experts") and self.is_drawn(0.4):
            regions = {"experts": ["wm", "gm"], "warm_start_epochs": 1, "isolated": 0.5}
            fixed["regions"] = regions
        method = self.draw_settings(Method, **{"router": None, "experts": None} | fixed)
        if any(loss["kind"] == "router_kl" for loss in method.get("regularizers", ())):
            settings = Method.model_fields["teacher_router"].annotation
            method["teacher_router"] = self.draw_value(settings)
            method["unguided_regularizers"] = self.random.choice(
                ([], [self.draw_part(Regularizer)])
            )
        return {name: value for name, value in method.items() if value not in (None, {}, [])}

    def _draw_routing(self) -> dict[str, Any]:
        router = self.draw_part(Router)
        losses = [self.draw_part(Regularizer) for _ in range(self.random.choice((0, 1, 2)))]
        if loss := COMPANIONS.get(router["kind"]):
            losses.append({"kind": loss})
        return {"router": router, "experts": self.draw_part(Experts), "regularizers": losses}

    def draw_source(self) -> dict[str, Any]:
        """Return a data set of the study's world."""
        seed, side = self.random.randrange(100), self.random.choice((4, 8))
        if self.name == "volumes":
            return {"kind": "phantom", "subjects": 24, "seed": seed}
        if self.name == "text":
            text = {"kind": "wikitext", "root": str(self.raw / "text")}
            return text | {"block": 8, "context": self.random.choice((0, 2))}
        cells = {"source": {"kind": "digits", "size": side}, **COUNTS, "seed": seed}
        if self.name == "captions":
            return {"kind": "captioned_mosaic", **cells, "captions": 2}
        folder = {"kind": "image_folder", "root": str(self.raw / "photos"), "seed": seed}
        folder |= {"validation": 0.25, "test": 0.25, "channels": self.channels}
        form = self.random.choice(("image", "mosaic", "cells"))
        grey = (
            {"kind": "clusters", "patch": 4, "grid": side // 2, **COUNTS, "seed": seed},
            {"kind": "subspaces", "size": side, "subspaces": 3, "rank": 2, **COUNTS, "seed": seed},
            {"kind": "dialects", "form": form, "dialects": 2, **cells, "train": 140},
            {"kind": "mosaic", **cells},
            {"kind": "digits", "size": 2 * side, "train_limit": 60, "test_limit": 20},
        )
        photos = folder | {"size": 2 * side}
        if self.channels == 3:
            return self.random.choice((photos, folder | {"size": 32, "short_side": 32}))
        return self.random.choice((photos, *grey))


def write_raw_data(folder: Path) -> Path:
    """Write 42 photographs of three classes and a text; return the folder, which may exist."""
    random = np.random.default_rng(0)
    for number in range(42):
        path = folder / "photos" / "abc"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (36, 40, 3), np.uint8)).save(path)
    (folder / "text").mkdir(exist_ok=True)
    for split, words in (("train", 1500), ("valid", 300), ("test", 300)):
        lines = [
            " ".join(f"w{word}" for word in random.integers(0, 30, 12)) for _ in range(words // 12)
        ]
        (folder / f"text/wiki.{split}.tokens").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
