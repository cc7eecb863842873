"""What every calibrator promises, as a function that a test calls in one line."""

from typing import Any

import numpy as np
import torch

from moecore.measure.calibrators.base import Calibrator
from moecore.testing.check_helpers import assert_that, seeded_randn, settings_of


def check_calibrator(calibrator: Calibrator | type[Calibrator]) -> None:
    """Raise AssertionError, in one line, where a calibrator breaks a promise of calibrators.

    calibrator: settings, or their class, whose defaults are then checked. It is fitted to logits
    (N, K) that are too sure of themselves, or to numbers (N,) that lean towards their mean, in two
    groups. The fit draws nothing, is the same twice and behind JSON, and is of the calibrator's
    kind. What it calibrates is finite, keeps its shape, and depends on no other prediction.
    """
    settings = settings_of(calibrator)
    predictions, labels = _logits() if settings.predicts == "classes" else _numbers()
    groups = ["F", "M"] * (len(labels) // 2) if settings.predicts == "numbers" else None
    before = torch.get_rng_state()
    fitted = settings.fit(predictions, labels, groups)
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "its fit draws no number")
    fits = isinstance(fitted, settings.fitted) and fitted.kind == settings.kind
    assert_that(settings, fits, "fit returns what fitted says, of its kind")
    again = settings.fit(predictions, labels, groups)
    assert_that(settings, again == fitted, "it fits the same twice")
    read = settings.fitted.model_validate_json(fitted.model_dump_json())
    assert_that(settings, read == fitted, "what is fitted is the same behind JSON")
    for given in [None] if groups is None else [None, groups]:
        ages = {"ages": labels} if fitted.uses_age else {}
        values = fitted.apply(predictions, given, **ages)
        fits = values.shape == predictions.shape and np.isfinite(np.asarray(values)).all()
        assert_that(settings, fits, "what it calibrates is finite and keeps its shape")
        first = {name: known[1:2] for name, known in ages.items()}
        alone = fitted.apply(predictions[1:2], given and given[1:2], **first)
        same = np.allclose(np.asarray(alone), np.asarray(values[1:2]))
        assert_that(settings, same, "a prediction is calibrated alike in any batch")
    if groups:
        assert_that(settings, len(fitted.used(groups)) == len(groups), "used has one for each")


def _logits() -> tuple[Any, Any]:
    logits = 6 * seeded_randn(300, 4)
    return logits, (logits / 3 + seeded_randn(300, 4, seed=2)).argmax(dim=1)


def _numbers() -> tuple[Any, Any]:
    ages = np.linspace(20, 90, 60)
    return 11 + 0.8 * ages + 3 * seeded_randn(60).double().numpy(), ages
