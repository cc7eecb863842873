"""Every model of ``run.methods`` is built without memory, as each phase will build it.

What a constructor refuses is said before anything runs, with the line of the method.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moecore.data.preview import Preview
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.model import BackboneModel
from moecore.nn.layers.moe import MoELayer
from moecore.nn.meta_device import on_meta_device
from moecore.study.contracts import takes
from moecore.study.mistakes import REFUSED, placed
from moecore.study.study import PHASES, Study
from moecore.study.training_rules import building_rules, guiding_rules, upcycling_rules
from moecore.tasks.classification import Classification
from moecore.training.method import Method

Found = Iterator[tuple[tuple, str]]  # (keys, what is wrong)

ANY_CLASSES = Classification(classes=("one", "other"))  # where they are not known yet


class Phase(NamedTuple):
    """One training stage: its name, its settings, its images."""

    name: str
    settings: Any
    image: ImageSpec


def model_rules(study: Study, previews: Mapping[str, Preview]) -> list[tuple[tuple, str]]:
    """(keys, what is wrong) of every model that cannot be, each once."""
    phases = [
        Phase(name, getattr(study, name), image_of(previews[name]))
        for name in PHASES
        if name in previews and getattr(study, name) is not None
    ]
    found: list[tuple[tuple, str]] = []
    with on_meta_device():
        for phase in (phase for phase in phases if phase.name == "pretrain"):
            found += building_rules(study, phase.name, phase.image)
        for name in study.run.methods:
            found += _method(study, name, study.methods[name], phases)
    return list(dict.fromkeys(found))


def image_of(preview: Preview) -> ImageSpec:
    """The images that a model is built for, with any statistics."""
    middle = (0.5,) * preview.channels
    task = preview.task or ANY_CLASSES
    return ImageSpec(
        channels=preview.channels, size=preview.size, mean=middle, std=middle, task=task
    )


def _method(study: Study, name: str, method: Method, phases: list[Phase]) -> Found:
    if study.model is None:
        return
    backbone = method.sized(study.model)
    start = None
    for phase in phases:
        try:
            learned = _learned(method, phase)
            model = backbone.build(phase.image, learned.moe)
        except REFUSED as error:
            yield placed(error, name, method, phase.name, phase.settings)
            continue
        yield from _calls(name, model)
        if phase.name == "pretrain":
            start = model
            yield from upcycling_rules(study, name, method, model)
        else:
            yield from _goes_on(phase, start, model)
        yield from guiding_rules(study, name, learned, phase.name, model)


def _learned(method: Method, phase: Phase) -> Method:
    """The method as a phase trains it."""
    if phase.name == "pretrain":
        return method
    return method.for_finetuning(phase.settings.k, phase.settings.guided)


def _calls(name: str, model: BackboneModel) -> Found:
    """Whether routers and experts can be called as their layer calls them."""
    for layer in model.modules():
        if not isinstance(layer, MoELayer):
            continue
        for key, part, words in (
            ("router", layer.router, ("tokens", "context")),
            ("experts", layer.experts, ("rows",)),
        ):
            if why := takes(type(part), "forward", words):
                yield ("methods", name, key), why
        return  # all layers are alike


def _goes_on(phase: Phase, start: BackboneModel | None, model: BackboneModel) -> Found:
    """Whether a pretrained model can be brought to the images of a later phase."""
    if not model.moves:
        text = f"found {model.config.kind}, whose models work at one image size only"
        yield (
            ("model", "kind"),
            f"{text}; allowed with {phase.name}: swin, swin_moe, swin_v2, vit, vit3d",
        )
        return
    mode = phase.settings.interpolation
    moved = start is not None and start.layout.grid != model.layout.grid
    if moved and len(model.layout.grid) == 3 and mode != "bilinear":
        yield (phase.name, "interpolation"), f"found {mode}; allowed for volumes: bilinear"
