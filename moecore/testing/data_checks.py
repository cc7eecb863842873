"""Checks of data sources and tasks."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError, read_json
from moecore.core.outside_packages import more_packages, outside_kinds_in_settings
from moecore.data.card import Card, card_of_written_data
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.base import Source
from moecore.tasks.base import Task
from moecore.testing.check_helpers import assert_that, is_close, settings_of


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
    settings = settings_of(source)
    planned = check_source_preview(settings)
    card, repeated = settings.write(folder / "first"), settings.write(folder / "second")
    assert_that(settings, repeated == card, "the same settings write the same bytes")
    try:
        with more_packages({kind.partition(".")[0] for kind in outside_kinds_in_settings(card)}):
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
    _check_foresight(settings, planned, card_of_written_data(card))
    return data


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
    settings = settings_of(source)
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


def _check_foresight(settings: Source, planned: Card, written: Card) -> None:
    problem = planned.problem
    assert_that(settings, problem is None, f"describe sees no problem ({problem})")
    wrong = [
        name
        for name in ("name", "channels", "shape", "classes", "images", "regions", "truth")
        if getattr(planned, name) not in (None, {}, getattr(written, name))
    ]
    assert_that(settings, not wrong, f"describe foresees {', '.join(wrong)}")


def check_task(task: Task, prediction: Tensor, labels: np.ndarray, wrong: np.ndarray) -> None:
    """Check that a task keeps the promises of tasks.

    The loss is a finite fp32 scalar, the mean of the items' losses, with a finite gradient. The
    running sum agrees with the mean of the scores, and encoded scores decode to the same scores.
    Labels have their storage format, and wrong labels are a UserError in one line.

    Args:
        task: settings of the task.
        prediction: outputs of a model for N items, (N, …, K) fp32.
        labels: labels of these items, (N, …).
        wrong: labels that the task must refuse.

    Raises:
        AssertionError: a promise is broken; one line with the task's name.
    """
    number, targets = len(labels), torch.from_numpy(labels)
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
    _check_refusal(task, wrong)


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
    encoded = json.loads(json.dumps(task.encode_scores(scores)))
    decoded = task.decode_scores(encoded, number)
    assert_that(task, torch.equal(decoded, scores), "decode_scores inverts encode_scores")


def _check_refusal(task: Task, wrong: np.ndarray) -> None:
    promise = "it refuses wrong labels in one line that begins with their name"
    try:
        task.check(wrong, "labels")
    except UserError as error:
        assert_that(task, str(error).startswith("labels ") and "\n" not in str(error), promise)
    else:
        assert_that(task, False, promise)
