"""Rules for check that try parts of outside packages, and one small step of every method.

Parts have the study's settings; models and data are small. A UserError is no fault but a note that
the part was not tried. Nothing is prepared, downloaded or trained.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from moecore import testing
from moecore.attacks.base import Attack
from moecore.core.config import Part, Surroundings
from moecore.core.files import UserError
from moecore.core.source_layout import DOTTED_NAME, format_error_with_line
from moecore.data.card import Card
from moecore.data.sources.base import Source
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.calibrators.base import Calibrator
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import MoESettings
from moecore.nn.predict import meta_device_context
from moecore.nn.routers.base import Router
from moecore.study.model_rules import planned_image_spec
from moecore.study.params_reader import Keys
from moecore.study.part_rules import find_section_settings, walk_settings
from moecore.study.study import Misfits, Study
from moecore.tasks.base import Task
from moecore.testing import check_helpers
from moecore.testing.data_and_evaluation_checks import YEARS
from moecore.training.job import Objective
from moecore.training.regularizers.base import Regularizer
from moecore.training.teachers.base import Teacher

TRIAL_ITEMS = 4  # with which a task is tried
MAX_WORK = 2e7  # weights times tokens of a backbone that is tried, for at most a second
CHECK_BY_FAMILY: dict[Any, Callable[[Any], None]] = {
    Experts: testing.check_experts,
    Regularizer: testing.check_regularizer,
    Calibrator: testing.check_calibrator,
}


def outside_source_misfits(study: Study, notes: list[str]) -> Misfits:
    """Yield (keys, message) for failing sources of other packages; ``notes`` gets untried ones."""
    for phase, source in study.data.items():
        keys = ("data", phase)
        if _is_from_outside(source):
            attempt = partial(testing.check_source_preview, source)
            yield from _trial_misfits(keys, source.kind, attempt, notes)


def outside_part_misfits(study: Study, previews: Mapping[str, Card], notes: list[str]) -> Misfits:
    """Yield (keys, message) for failing outside parts, except sources; ``notes``: untried parts."""
    for phase, preview in previews.items():
        if preview.task is not None and _is_from_outside(preview.task):
            attempt = partial(_try_task, preview.task)
            yield from _trial_misfits(("data", phase), preview.task.kind, attempt, notes)
    images = planned_image_spec(previews["pretrain"]) if "pretrain" in previews else None
    chosen = {name: study.methods[name] for name in study.run.methods}
    tried = study.model_copy(update={"methods": chosen})
    for keys, part, around in walk_settings((), tried, Surroundings()):
        if isinstance(part, Part) and _is_from_outside(part) and not isinstance(part, Source):
            attempt = partial(_run_family_checks, part, around.experts, images)
            yield from _trial_misfits(keys, part.kind, attempt, notes)
    for name in study.run.measurements:
        if DOTTED_NAME.fullmatch(name):
            attempt = partial(_try_measurement, find_section_settings(study, name))
            yield from _trial_misfits(tuple(name.split(".")), name, attempt, notes)


def run_and_list_faults(attempt: Callable[[], Any], refusals: list[str]) -> Iterator[str]:
    """Run ``attempt`` with seed 0; yield its error as a line; a UserError goes to ``refusals``."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            attempt()
    except UserError as error:
        refusals.append(str(error))
    except AssertionError as error:
        yield str(error) or format_error_with_line(error)
    except Exception as error:
        yield format_error_with_line(error)


def _trial_misfits(keys: Keys, kind: str, attempt: Callable[[], Any], notes: list[str]) -> Misfits:
    refusals: list[str] = []
    for fault in run_and_list_faults(attempt, refusals):
        yield keys, f"found {kind}, which breaks what moecore.testing asks: {fault}"
    notes += [f"{kind} was not tried in small: {refusal}" for refusal in refusals]


def _is_from_outside(part: Part) -> bool:
    return DOTTED_NAME.fullmatch(part.kind) is not None


def _run_family_checks(part: Any, experts: Experts | None, images: ImageSpec | None) -> None:
    """Check a part as its family (base class, such as Router) asks; AssertionError if it fails."""
    if part.family is Router and experts is not None:
        testing.check_router(part, experts)
    elif part.family in (Backbone, Teacher):
        _try_model(part, images)
    elif part.family is Attack:
        if refusal := part.refuses(check_helpers.CLASSES) and part.refuses(YEARS):
            raise UserError(refusal)
        testing.check_attack(part)
    else:
        CHECK_BY_FAMILY[part.family](part)


def _try_model(part: Any, images: ImageSpec | None) -> None:
    if images is None:
        raise UserError("the images of pretraining are not known yet")
    is_teacher = part.family is Teacher
    if is_teacher and part.training is None:
        part.check_name(images)  # building it may download its weights
        return
    with meta_device_context():
        model = part.build(images)
    layout = model.layout_of(0)
    weights = sum(weight.numel() for weight in model.parameters())
    if weights * (layout.special + prod(layout.grid)) > MAX_WORK:
        check = "check_teacher" if is_teacher else "check_backbone"
        raise UserError(f"its model has {weights:,} weights; moecore.testing.{check} tries smaller")
    if is_teacher:
        testing.check_teacher(part, images)
    else:
        testing.check_backbone(part, images)


def _try_measurement(measurement: Measurement) -> None:
    """Check a measurement on a small ViT; AssertionError: wrong, UserError: it cannot run there."""
    # A measurement that fails here may work with the study's models and images.
    subject = MeasuredModel(check_helpers.small_vit(), check_helpers.small_data())
    if refusal := measurement.applies(subject):
        raise UserError(refusal)
    try:
        testing.check_measurement(measurement, subject)
    except AssertionError as error:
        if error.__cause__ is None:
            raise
        setting = "on a small ViT and 24 images of 8 × 8 pixels"
        raise UserError(f"it fails {setting}: {format_error_with_line(error.__cause__)}") from error


def _try_task(task: Task) -> None:
    if task.long:
        raise UserError("its predictions are scored as they come")
    shape, dtype = task.storage_format(TRIAL_ITEMS)
    labels = np.zeros(shape, dtype)
    task.check(labels, "labels of zeros")
    prediction = check_helpers.seeded_randn(TRIAL_ITEMS, task.cells * task.outputs)
    testing.check_task(task, prediction, labels, np.full(shape, np.nan))


def trial_step_misfits(study: Study, faulty: Collection[tuple] = ()) -> Misfits:
    """Yield (keys, message) per method whose small training step fails; skips ``faulty`` keys."""
    # faulty: keys of known faults; methods and text towers that have one are left out.
    for name in study.run.methods:
        method = study.methods[name]
        towers = (((), method, method.losses), (("text",), method.text, method.text_losses))
        for place, tower, losses in towers:
            keys = ("methods", name, *place)
            is_known = any(keys_of_fault[: len(keys)] == keys for keys_of_fault in faulty)
            if tower is None or tower.router is None or tower.experts is None or is_known:
                continue
            moe = MoESettings(router=tower.router, experts=tower.experts, blocks="all")
            for fault in run_and_list_faults(partial(_run_training_step, moe, losses), []):
                yield keys, f"a small step fails: {fault}"


def _run_training_step(moe: MoESettings, losses: Sequence[Regularizer]) -> None:
    """Compute one small training step; AssertionError if a loss or gradient is not finite."""
    model = check_helpers.small_vit(moe=moe)
    step = check_helpers.small_objective_inputs(model)
    objective = Objective(losses)
    terms = objective.terms(step)
    for name, term in terms.items():
        assert term.ndim == 0 and term.isfinite(), f"the loss {name} is no finite scalar"
    objective.total(terms).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
