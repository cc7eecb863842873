"""A training run that was killed goes on where it was.

One safetensors file holds weights, optimiser and position; views, order and noise are functions of
(seed, step), so nothing else is needed for a run that ends bit-equal to an uninterrupted one on
CPU.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from moecore.core.ranks import like, ranks, whole_of
from moecore.core.tensors import read_tensors, write_tensors


class Checkpoint:
    """The checkpoint of one run, in a folder that outlives the process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint.safetensors"

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, note: dict
    ) -> None:
        """Replace the checkpoint atomically; ``step`` steps are done, ``note`` is small JSON kept
        with them.
        """
        tensors = {
            f"model.{name}": whole_of(value) for name, value in model.state_dict().items()
        } | _optimizer_tensors(optimizer)
        if not ranks().first:
            return
        write_tensors(self.path, tensors, {"step": str(step), "note": json.dumps(note)})

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
        """Restore model and optimiser; returns (steps done, note), or (0, {}) where there is no
        checkpoint.

        Raises UserError where the file is damaged (it is written atomically, so only a failing disk
        does that).
        """
        if not self.path.exists():
            return 0, {}
        tensors, metadata = read_tensors(self.path)
        there = model.state_dict()
        model.load_state_dict(
            {
                name.removeprefix("model."): like(value, there[name.removeprefix("model.")])
                for name, value in tensors.items()
                if name.startswith("model.")
            }
        )
        _restore_optimizer(optimizer, tensors)
        return int(metadata["step"]), json.loads(metadata["note"])


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{name}": whole_of(value)
        for index, values in state.items()
        for name, value in values.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    whole = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, field = name.split(".")
            of = parameters[int(index)]
            if value.shape == of.shape:
                value = like(value, of.detach())
            whole["state"].setdefault(int(index), {})[field] = value
    optimizer.load_state_dict(whole)
