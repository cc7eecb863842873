import math

import pytest
import torch

from moecore.training.regularizers.z_loss import ZLoss, z_loss
from tests.training.regularizers.steps import record, step

# Two tokens: logsumexp(ln 1, ln 3) = ln 4 and logsumexp(ln 2, ln 6) = ln 8.
LOGITS = [[[0.0, math.log(3)], [math.log(2), math.log(6)]]]


def test_value_by_hand():
    # (ln²4 + ln²8)/2 = (4 + 9)/2·ln²2
    assert z_loss(logits=torch.tensor(LOGITS)).item() == pytest.approx(6.5 * math.log(2) ** 2)


def test_layers_are_summed():
    assert ZLoss()(step(record(logits=LOGITS), record(logits=LOGITS))).item() == pytest.approx(
        13 * math.log(2) ** 2
    )
    assert ZLoss().weight == 1e-3 and ZLoss.needs == {"routing"}


def test_large_logits_stay_finite():
    assert z_loss(logits=torch.full((1, 1, 2), 1e4)).item() == pytest.approx(
        (1e4 + math.log(2)) ** 2
    )
