"""What every task promises, as a function that a test calls in one line."""

import json

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.tasks.base import Task
from moecore.testing.check_helpers import assert_that, is_close


def check_task(task: Task, prediction: Tensor, labels: np.ndarray, wrong: np.ndarray) -> None:
    """Raise AssertionError, in one line, where a task breaks a promise of tasks.

    prediction: (N, …, K) fp32 of N items, as a model gives it; labels: (N, …) of a split, of its
    task; wrong: such as it must refuse. The loss is a finite fp32 scalar, the mean of those of the
    items, with a finite gradient. Scores have a mean that the running sum agrees with, and come
    back from what a result keeps. Labels have the format that they are stored in, and wrong ones
    are a UserError in one line.
    """
    number, said = len(labels), torch.from_numpy(labels)
    fits = prediction.shape[-1] == task.cells * task.outputs and len(prediction) == number
    assert_that(task, fits, "predictions have its outputs")
    again = type(task).model_validate_json(task.model_dump_json())
    assert_that(task, again == task, "its settings are the same behind JSON")
    leaf = prediction.clone().requires_grad_()
    loss = task.loss(leaf, said)
    scalar = loss.ndim == 0 and loss.dtype == torch.float32 and bool(loss.isfinite())
    assert_that(task, scalar, "the loss is a finite fp32 scalar")
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert_that(task, gradient.isfinite().all() and gradient.any(), "the loss has a gradient")
    each = task.loss(prediction, said, reduction="none")
    assert_that(task, each.shape == (number,), 'the loss has (B,) with reduction "none"')
    assert_that(task, is_close(each.mean(), loss), "the loss is the mean of the items' losses")
    climbed = task.attack_loss(prediction, said)
    fits = climbed.shape == (number,) and climbed.dtype == prediction.dtype
    assert_that(task, fits, "an attack's loss is (B,) in the prediction's dtype")
    tested = task.test_loss(prediction, said)
    fits = tested.shape == (number,) and tested.dtype == torch.float64
    assert_that(task, fits, "the loss of a test split is (N,) fp64")
    _check_scores(task, prediction, said)
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
    assert_that(task, is_close(sums, mean * number), "the running sum is that of the scores")
    interval = task.interval(scores)
    centred = interval.value is not None and abs(interval.value - float(mean)) < 1e-9
    assert_that(task, centred, "the interval is around the mean score")
    kept = json.loads(json.dumps(task.encode_scores(scores)))
    decoded = task.decode_scores(kept, number)
    assert_that(task, torch.equal(decoded, scores), "decode_scores gives what encode_scores kept")


def _check_refusal(task: Task, wrong: np.ndarray) -> None:
    promise = "it refuses wrong labels in one line that begins with their name"
    try:
        task.check(wrong, "labels")
    except UserError as error:
        assert_that(task, str(error).startswith("labels ") and "\n" not in str(error), promise)
    else:
        assert_that(task, False, promise)
