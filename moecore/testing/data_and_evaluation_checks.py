"""Checks of data sources, tasks, measurements, calibrators and attacks."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moecore.attacks import attack_target, base
from moecore.conformance.targets import has_same_state, is_close, seeded_randn
from moecore.core.files import UserError, read_json
from moecore.core.source_layout import allowing_packages, outside_kinds_in_settings
from moecore.data.card import Card, build_card_from_dict
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.base import Source
from moecore.measure.base import Calculation, MeasuredModel, Measurement
from moecore.measure.calibrators.base import Calibrator
from moecore.measure.values import BETTER, FORMS, Found, PartStore
from moecore.tasks.base import Task
from moecore.tasks.regression import Regression
from moecore.testing.check_helpers import (
    CLASSES,
    IMAGE,
    SIDE,
    assert_refused,
    assert_that,
    instantiate_settings,
    name_part_in_errors,
    small_data,
    small_vit,
)


@name_part_in_errors
def check_source(source: Source | type[Source], folder: Path) -> Prepared:
    """Check that a data source keeps its promises, and return the data that it wrote.

    The data have the layout of moecore/data/prepared.py and no other files, labels of the task, and
    the properties that ``describe`` announced. The same settings write the same bytes, whatever
    random numbers were drawn before.

    Args:
        source: settings of small data, or their class, whose defaults are checked.
        folder: where the data are prepared, twice.

    Returns:
        The prepared data.

    Raises:
        AssertionError: a promise is broken; one line with the source's name.
    """
    settings = instantiate_settings(source)
    planned = check_source_preview(settings)
    card, repeated = settings.write(folder / "first"), settings.write(folder / "second")
    assert_that(settings, repeated == card, "the same settings write the same bytes")
    try:
        packages = {kind.partition(".")[0] for kind in outside_kinds_in_settings(card)}
        with allowing_packages(packages):
            data = Prepared.open(folder / "first", verify=True)
    except UserError as error:
        raise AssertionError(f"{type(settings).__name__}: what it wrote opens: {error}") from error
    assert_that(settings, read_json(data.folder / "card.json") == card, "it returns its card")
    names = sorted(path.name for path in data.folder.iterdir())
    promise = "the folder has the card's files and nothing else"
    assert_that(settings, names == sorted([*card["files"], "card.json"]), promise)
    assert_that(settings, isinstance(data.task, settings.task), "its labels are of its task")
    for split in data[1:4]:
        data.task.check(np.asarray(split.labels), f"{type(settings).__name__}: labels")
    volumes = data.test.images.ndim == 5
    assert_that(settings, volumes == settings.volumes, "volumes says whether images have 3 axes")
    problem = planned.problem
    written = build_card_from_dict(card)
    assert_that(settings, problem is None, f"describe sees no problem ({problem})")
    wrong = [
        name
        for name in ("name", "channels", "shape", "classes", "image_counts", "regions", "truth")
        if getattr(planned, name) not in (None, {}, getattr(written, name))
    ]
    assert_that(settings, not wrong, f"describe foresees {', '.join(wrong)}")
    return data


@name_part_in_errors
def check_source_preview(source: Source | type[Source]) -> Card:
    """Check that a source's ``describe`` keeps its promises, without preparing data.

    It returns the same card twice and draws no random number. The card has the source's task and
    counts images by split, and ``volumes`` says whether images have three axes.

    Args:
        source: settings, or their class, whose defaults are checked.

    Returns:
        The card that ``describe`` returns.

    Raises:
        AssertionError: a promise is broken; one line with the source's name.
    """
    settings = instantiate_settings(source)
    before = torch.get_rng_state()
    planned, repeated = settings.describe(), settings.describe()
    assert_that(settings, planned == repeated, "describe says the same twice")
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "describe draws no number")
    if planned.problem is not None:
        return planned
    fits = planned.task is None or isinstance(planned.task, settings.task)
    assert_that(settings, fits, "describe foresees labels of its task")
    is_volume = len(planned.shape) == 3
    assert_that(settings, is_volume == settings.volumes, "volumes says whether images have 3 axes")
    fits = not planned.counts or set(planned.counts) == set(SPLITS)
    assert_that(settings, fits, f"counts has {', '.join(SPLITS)}")
    return planned


@name_part_in_errors
def check_task(task: Task, prediction: Tensor, labels: np.ndarray, wrong: np.ndarray) -> None:
    """Check that a task keeps the promises of tasks.

    The loss is a finite fp32 scalar, the mean of the items' losses, with a finite gradient. The
    task's ``running`` returns the scores' sum, and encoded scores decode to the same scores.
    Labels have their storage format, and wrong labels are a UserError in one line.

    Args:
        task: settings of the task.
        prediction: outputs of a model for N items, (N, …, K) fp32.
        labels: labels of these items, (N, …).
        wrong: labels that the task must refuse.

    Raises:
        AssertionError: a promise is broken; one line with the task's name.
    """
    number = len(labels)
    targets = torch.from_numpy(labels)
    fits = prediction.shape[-1] == task.cells * task.outputs and len(prediction) == number
    assert_that(task, fits, "predictions have its outputs")
    decoded = type(task).model_validate_json(task.model_dump_json())
    assert_that(task, decoded == task, "its settings are the same behind JSON")
    leaf = prediction.clone().requires_grad_()
    loss = task.loss(leaf, targets)
    scalar = loss.ndim == 0 and loss.dtype == torch.float32 and bool(loss.isfinite())
    assert_that(task, scalar, "the loss is a finite fp32 scalar")
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert_that(task, gradient.isfinite().all() and gradient.any(), "the loss has a gradient")
    losses = task.loss(prediction, targets, reduction="none")
    assert_that(task, losses.shape == (number,), 'the loss has (B,) with reduction "none"')
    assert_that(task, is_close(losses.mean(), loss), "the loss is the mean of the items' losses")
    attack_losses = task.attack_loss(prediction, targets)
    fits = attack_losses.shape == (number,) and attack_losses.dtype == prediction.dtype
    assert_that(task, fits, "an attack's loss is (B,) in the prediction's dtype")
    test_losses = task.test_loss(prediction, targets)
    fits = test_losses.shape == (number,) and test_losses.dtype == torch.float64
    assert_that(task, fits, "the loss of a test split is (N,) fp64")
    _check_scores(task, prediction, targets)
    if not task.long:  # a text is stored as its tokens
        shape, dtype = task.storage_format(number)
        fits = labels.shape == shape and np.array_equal(labels.astype(dtype), labels)
        assert_that(task, fits, "storage_format is the format of its labels")
    task.check(labels, "labels")
    promise = "it refuses wrong labels in one line that begins with their name"
    assert_refused(task, lambda: task.check(wrong, "labels"), promise, "labels ")


def _check_scores(task: Task, prediction: Tensor, labels: Tensor) -> None:
    number = len(labels)
    scores = task.scores(prediction, labels)
    fits = scores.shape == (number,) and scores.dtype in (torch.bool, torch.float64)
    assert_that(task, fits, "scores are (N,), bool or fp64")
    mean = scores.double().mean()
    sums = task.running(prediction, labels).double()
    assert_that(task, is_close(sums, mean * number), "the running sum is the scores' sum")
    interval = task.interval(scores)
    centred = interval.value is not None and abs(interval.value - float(mean)) < 1e-9
    assert_that(task, centred, "the interval is around the mean score")
    decoded = task.decode_scores(json.loads(json.dumps(task.encode_scores(scores))), number)
    assert_that(task, torch.equal(decoded, scores), "decode_scores inverts encode_scores")


class SimulatedKill(Exception):
    """Raised by ``KillablePartStore`` to simulate a killed process."""


class KillablePartStore:
    """A ``PartStore`` in memory that raises SimulatedKill after ``until_kill`` results."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.until_kill: int | None = None  # None: never killed

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.stored:
            self.stored[name] = json.dumps(compute())
            if self.until_kill is not None:
                self.until_kill -= 1
            if self.until_kill == 0:
                raise SimulatedKill
        return json.loads(self.stored[name])


@name_part_in_errors
def check_measurement(
    measurement: Measurement | type[Measurement], subject: MeasuredModel | None = None
) -> Found:
    """Check that a measurement keeps the promises of measurements, and return its result.

    The result survives JSON. The measurement draws no global random number and does not change the
    model. If it is killed after any piece and resumed, it has the same result.

    Args:
        measurement: settings, or their class, whose defaults are checked.
        subject: the model and data to measure; None: a small ViT with two MoE layers, and 24 images
            of 8 × 8 pixels of four classes.

    Returns:
        The result of the measurement.

    Raises:
        AssertionError: a promise is broken; one line with the measurement's name.
    """
    settings = instantiate_settings(measurement)
    subject = subject or MeasuredModel(small_vit(), small_data())
    reason = settings.applies(subject)
    assert_that(settings, reason is None, f"it applies to what it is checked with ({reason})")
    weights = copy.deepcopy(subject.model.state_dict())
    result = _check_survives_kill(settings, partial(settings.collect_result, subject))
    same = has_same_state(subject.model, weights) and not subject.model.training
    assert_that(settings, same, "it leaves the model as it was")
    return result


@name_part_in_errors
def check_calculation(calculation: Calculation | type[Calculation]) -> Found:
    """Check that a measurement without a model keeps its promises, and return its values.

    They survive JSON. It draws no global random number. If it is killed after any piece and
    resumed, it has the same values.

    Args:
        calculation: settings, or their class, whose defaults are checked.

    Returns:
        The values of the calculation.

    Raises:
        AssertionError: a promise is broken; one line with the calculation's name.
    """
    settings = instantiate_settings(calculation)
    return _check_survives_kill(settings, settings.collect_values)


def _check_survives_kill(settings: Measurement, collect: Callable[[PartStore], Found]) -> Found:
    """Return the result of ``collect``; AssertionError unless it survives a kill and JSON."""
    before = torch.get_rng_state()
    result = collect(KillablePartStore())
    _check_fits_declared_metrics(settings, result)
    decoded = Found.model_validate_json(result.model_dump_json())
    assert_that(settings, decoded == result, "its result is the same behind JSON")
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "it draws no global number")
    pieces = KillablePartStore()
    resumed = None
    while resumed is None:  # killed after each stored piece
        pieces.until_kill = 1
        with suppress(SimulatedKill):
            resumed = collect(pieces)
    promise = "killed after any piece and resumed it has the same result"
    assert_that(settings, resumed == result, promise)
    return result


def _check_fits_declared_metrics(settings: Measurement, found: Found) -> None:
    """Raise AssertionError for results that do not fit the measurement's declared metrics."""
    names = settings.all_metrics()
    for name, metric in names.items():
        for key, allowed in (("better", BETTER), ("form", FORMS)):
            promise = f"{key} of {name} is one of {', '.join(map(repr, allowed))}"
            assert_that(settings, getattr(metric, key) in allowed, promise)
    used = [value.metric.removesuffix("_chance") for value in found.values]
    for name in [*used, *(chart.metric for chart in settings.page.charts)]:
        promise = f"what it puts and charts is declared: {name!r} is none of {', '.join(names)}"
        assert_that(settings, name in names, promise)
    _check_places(settings, found)


def _check_places(settings: Measurement, result: Found) -> None:
    """Raise AssertionError unless values and charts have the places that ``Metric.over`` names."""
    metrics = settings.all_metrics()
    used: dict[str, list[set[str]]] = {}  # metric → places of its values
    for value in result.values:
        used.setdefault(value.metric.removesuffix("_chance"), []).append({*value.at})
    declared = {place for metric in metrics.values() for place in metric.places}
    for name, places in used.items():
        expected = {*metrics[name].places}
        for place in sorted(set().union(*places) - declared):  # others are of pictures
            close = get_close_matches(place, declared, 1)
            promise = f"{name} is put at places of `over`: {place!r}, did you mean {close}?"
            assert_that(settings, not close, promise)
        promise = f"{name} is put at {', '.join(sorted(expected)) or 'no place'}, as `over` says"
        assert_that(settings, not metrics[name].label or expected in places, promise)
    for chart in settings.page.charts:
        has_place = {chart.over} in used.get(chart.metric, [{chart.over}]) or result.skipped
        promise = f"{chart.metric}, which a chart shows over {chart.over!r}, is put at that place"
        assert_that(settings, has_place, promise)


@name_part_in_errors
def check_calibrator(calibrator: Calibrator | type[Calibrator]) -> None:
    """Check that a calibrator keeps the promises of calibrators.

    It is fitted to overconfident logits (N, K), or to numbers (N,) in two groups that are biased
    towards their mean. The fit draws no random number, is the same twice and after JSON, and has
    the calibrator's kind. Calibrated predictions are finite, keep their shape, and do not depend on
    other predictions.

    Args:
        calibrator: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the calibrator's name.
    """
    settings = instantiate_settings(calibrator)
    predictions: Any
    labels: Any
    if settings.predicts == "classes":
        predictions = 6 * seeded_randn(300, 4)
        labels = (predictions / 3 + seeded_randn(300, 4, seed=2)).argmax(dim=1)
        groups = None
    else:
        labels = np.linspace(20, 90, 60)
        predictions = 11 + 0.8 * labels + 3 * seeded_randn(60).double().numpy()
        groups = ["F", "M"] * 30
    before = torch.get_rng_state()
    fitted = settings.fit(predictions, labels, groups)
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "its fit draws no number")
    fits = isinstance(fitted, settings.fitted) and fitted.kind == settings.kind
    assert_that(settings, fits, "fit returns what fitted says, of its kind")
    repeated = settings.fit(predictions, labels, groups)
    assert_that(settings, repeated == fitted, "it fits the same twice")
    read = settings.fitted.model_validate_json(fitted.model_dump_json())
    assert_that(settings, read == fitted, "what is fitted is the same behind JSON")
    for chosen_groups in [None] if groups is None else [None, groups]:
        ages = {"ages": labels} if fitted.uses_age else {}
        values = fitted.apply(predictions, chosen_groups, **ages)
        fits = values.shape == predictions.shape and np.isfinite(np.asarray(values)).all()
        assert_that(settings, fits, "what it calibrates is finite and keeps its shape")
        same = type(values) is type(predictions)  # a tensor of logits, or an array
        assert_that(settings, same, f"it returns a {type(predictions).__name__}, as it is given")
        first = {name: all_ages[1:2] for name, all_ages in ages.items()}
        alone = fitted.apply(predictions[1:2], chosen_groups and chosen_groups[1:2], **first)
        same = np.allclose(np.asarray(alone), np.asarray(values[1:2]))
        assert_that(settings, same, "a prediction is calibrated the same in any batch")
    if groups:
        assert_that(settings, len(fitted.used(groups)) == len(groups), "used has one for each")


EPSILON = 0.1
YEARS = Regression(target="age", unit="years")


@name_part_in_errors
def check_attack(attack: base.Attack | type[base.Attack]) -> None:
    """Check that an attack keeps the promises of attacks.

    Attacked images stay in [0, 1] and within ε of the clean images, and ε = 0 changes no bit. The
    same seeds give the same images in any batch. The model and the global random state do not
    change. An attack that climbs the task's loss raises it.

    Args:
        attack: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the attack's name.
    """
    settings = instantiate_settings(attack)
    task = CLASSES if settings.refuses(CLASSES) is None else YEARS
    accepts = settings.refuses(task) is None
    assert_that(settings, accepts, "it attacks a classification or a regression")
    target = small_attack_target(task)
    target.model.head.requires_grad_(False)
    random_state = torch.get_rng_state()
    clean = target.clean_images()
    before = copy.deepcopy(target.model.state_dict())
    attacked = target.attacked(settings, EPSILON)
    _check_images(settings, clean, attacked)
    same = torch.equal(target.attacked(settings, 0.0), clean)
    assert_that(settings, same, "ε = 0 changes no bit")
    promise = "the same seeds give the same images in batches of another size"
    for batch in (1, len(clean)):
        repeated = target._replace(batch=batch).attacked(settings, EPSILON)
        assert_that(settings, torch.allclose(repeated, attacked, atol=1e-5), promise)
    same = torch.equal(random_state, torch.get_rng_state())
    assert_that(settings, same, "it draws no global number")
    weights = dict(target.model.named_parameters())
    frozen = [name for name, weight in weights.items() if not weight.requires_grad]
    same = has_same_state(target.model, before) and frozen == ["head.weight", "head.bias"]
    same = same and all(weight.grad is None for weight in weights.values())
    assert_that(settings, same, "it leaves the model as it was, without gradients")
    if settings.climbs_task:
        with torch.no_grad():
            outputs = [target.model(images).prediction for images in (clean, attacked)]
        losses = [float(task.loss(output, target.labels, 0.0)) for output in outputs]
        assert_that(settings, losses[1] > losses[0], "it raises the mean loss of the task")


def small_attack_target(task: Task) -> attack_target.Target:
    """Return a small model with eight images to attack, one black and one white among them."""
    images = seeded_randn(8, 1, SIDE, SIDE).sigmoid()
    images[0] = 0.0
    images[1] = 1.0
    labels = torch.arange(8) % 4
    if task is YEARS:
        labels = labels.float()[:, None]
    model = small_vit(IMAGE.model_copy(update={"task": task}))
    return attack_target.Target(model, task, images, labels, batch=3)


def _check_images(attack: Any, clean: Tensor, attacked: Tensor) -> None:
    fits = attacked.shape == clean.shape and attacked.dtype == torch.float32
    assert_that(attack, fits, "it gives fp32 images of the same shape")
    assert_that(attack, not attacked.requires_grad, "its images are detached")
    near = (attacked - clean).abs().max() <= EPSILON + 1e-6
    assert_that(attack, near, "no pixel moves by more than ε")
    assert_that(attack, attacked.min() >= 0 and attacked.max() <= 1, "pixels stay in [0, 1]")
