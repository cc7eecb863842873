import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.records import ModelOutput, RoutingRecord
from moecore.nn.predict import predictions


class Small(nn.Module):
    """Two routed layers over four tokens; dropout and noise in training mode only."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 3)
        self.gates = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.noisy = noisy

    def forward(self, images: Tensor) -> ModelOutput:
        assert images.dtype == torch.float32 and images.max() <= 1
        tokens = self.dropout(images.flatten(1)).reshape(len(images), 4, 4)
        if self.noisy:
            torch.rand(3)
        return ModelOutput(
            self.head(tokens.flatten(1)), tuple(self._record(gate(tokens)) for gate in self.gates)
        )

    def _record(self, logits: Tensor) -> RoutingRecord:
        probs = logits.softmax(-1)
        chosen = probs == probs.amax(-1, keepdim=True)
        return RoutingRecord(logits, probs, chosen.float(), chosen, probs * chosen)


IMAGES = np.random.default_rng(0).integers(0, 256, (11, 1, 4, 4), dtype=np.uint8)


def test_does_not_depend_on_the_batch_size():
    whole, records = predictions(Small(), IMAGES, 100)
    assert whole.shape == (11, 3) and len(records) == 2 and records[0].probs.shape == (11, 4, 5)
    for batch in (1, 4, 11):
        logits, parts = predictions(Small(), IMAGES, batch)
        assert torch.allclose(logits, whole, atol=1e-6)
        for layer, other in zip(parts, records, strict=True):
            assert torch.equal(layer.chosen, other.chosen) and torch.allclose(
                layer.logits, other.logits, atol=1e-6
            )


def test_bytes_and_pixels_in_zero_to_one_are_the_same():
    assert torch.equal(
        predictions(Small(), IMAGES, 4)[0],
        predictions(Small(), torch.from_numpy(IMAGES).float() / 255, 4)[0],
    )


def test_leaves_modes_and_random_state_as_they_were():
    model = Small(noisy=True).train()
    state = None
    model.frozen.eval()
    state = torch.get_rng_state()
    logits, _ = predictions(model, IMAGES, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.dropout.training and not model.frozen.training
    assert not logits.requires_grad and torch.equal(logits, predictions(model, IMAGES, 4)[0])


def test_restores_the_mode_after_an_error():
    model = Small().train()
    with pytest.raises(RuntimeError):
        predictions(model, IMAGES[:, :, :3], 4)
    assert model.training


def test_is_fp32_under_autocast_and_keeps_no_records_when_told():
    with torch.autocast("cpu", torch.bfloat16):
        logits, records = predictions(Small(), IMAGES, 4, routing=False)
    assert (
        logits.dtype == torch.float32
        and records == ()
        and torch.equal(logits, predictions(Small(), IMAGES, 4)[0])
    )


def test_refuses_no_images():
    with pytest.raises(UserError, match="no images"):
        predictions(Small(), IMAGES[:0], 4)
