"""Every model of ``run.methods`` is built without memory, as each phase will build it.

What a constructor refuses is said before anything runs, with the line of the method.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moecore.data.preview import Preview
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.model import BackboneModel
from moecore.nn.meta_device import on_meta_device
from moecore.study.checking.refusals import REFUSED, locate_error
from moecore.study.checking.training_rules import building_rules, guiding_rules, upcycling_rules
from moecore.study.reading.study import TRAINING_PHASES, Study
from moecore.tasks.classification import Classification
from moecore.training.method import Method

Misfits = Iterator[tuple[tuple, str]]  # (keys, what is wrong)

ANY_CLASSES = Classification(classes=("one", "other"))  # where they are not known yet


class TrainingPhase(NamedTuple):
    """One training stage: its name, its settings, its images."""

    name: str
    settings: Any
    image: ImageSpec


def model_rules(study: Study, previews: Mapping[str, Preview]) -> list[tuple[tuple, str]]:
    """Return (keys, what is wrong) of every model that cannot be, each once."""
    phases = [
        TrainingPhase(name, getattr(study, name), image_spec(previews[name]))
        for name in TRAINING_PHASES
        if name in previews and getattr(study, name) is not None
    ]
    misfits: list[tuple[tuple, str]] = []
    with on_meta_device():
        for phase in (phase for phase in phases if phase.name == "pretrain"):
            misfits += building_rules(study, phase.name, phase.image)
        for name in study.run.methods:
            misfits += _method_problems(study, name, study.methods[name], phases)
    return list(dict.fromkeys(misfits))


def image_spec(preview: Preview) -> ImageSpec:
    """Return the images that a model is built for, with any statistics."""
    middle = (0.5,) * preview.channels
    task = preview.task or ANY_CLASSES
    return ImageSpec(
        channels=preview.channels, size=preview.size, mean=middle, std=middle, task=task
    )


def _method_problems(
    study: Study, name: str, method: Method, phases: list[TrainingPhase]
) -> Misfits:
    if study.model is None:
        return
    backbone = method.merge_model_settings(study.model)
    start = None
    for phase in phases:
        try:
            learned = _method_in_phase(method, phase)
            model = backbone.build(phase.image, learned.moe)
        except REFUSED as error:
            yield locate_error(error, name, method, phase.name, phase.settings)
            continue
        if phase.name == "pretrain":
            start = model
            yield from upcycling_rules(study, name, method, model)
        else:
            yield from _transfer_problems(phase, start, model)
        yield from guiding_rules(study, name, learned, phase.name, model)


def _method_in_phase(method: Method, phase: TrainingPhase) -> Method:
    """The method as a phase trains it."""
    if phase.name == "pretrain":
        return method
    return method.for_finetuning(phase.settings.k, phase.settings.guided)


def _transfer_problems(
    phase: TrainingPhase, start: BackboneModel | None, model: BackboneModel
) -> Misfits:
    """Yield why a pretrained model cannot be brought to the images of a later phase."""
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
