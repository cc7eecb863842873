"""A training run that was killed goes on where it was.

Weights, optimiser and position are enough: views, order and noise are functions of (seed, step), so
a run ends bit-equal to an uninterrupted one on CPU. A thread writes files while the training goes
on, whole and with a checksum; none is a pickle. The first rank writes one safetensors file, or, of
sharded parameters, every rank its own (torch.distributed.checkpoint); any number of ranks reads it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from moecore.core.files import UserError, file_checksum, read_json, write_sealed
from moecore.core.ranks import broadcast_text, check_equal_across_ranks, current_ranks
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.training import sharded_state
from moecore.training.artifacts import check_and_load_state_dict

AGAIN = "delete it and start the stage again"
UNTOUCHED = "what was there before is untouched. Free some space and start again"
Tensors = dict[str, Tensor]


class Inputs(Protocol):
    """What a training reads; an edit while it runs is a UserError."""

    def refuse_edited_code(self) -> None: ...

    def refuse_edited_settings(self) -> None: ...


class Checkpoint:
    """The checkpoint of one run, in a folder that outlives the process."""

    def __init__(self, folder: Path, inputs: Inputs | None = None) -> None:
        """inputs: compared at every ``save``, on the first rank; None: never."""
        self.folder = folder
        self.inputs = inputs
        self.path = folder / "checkpoint.safetensors"
        self.pointer = folder / "sharded.json"  # names the folder of a sharded one
        self._writing: Thread | None = None
        self._failed: BaseException | None = None
        self._group: Any = None  # the saving thread's own, beside the training's

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, note: dict
    ) -> None:
        """Copy the state after ``step`` steps, with a small ``note``; a thread replaces the file.

        Raises UserError where the last checkpoint could not be written, or the inputs were edited.
        A state that edited code may have computed is not written. With edited settings it is, so
        that the training resumes here once the edit is undone.
        """
        self.wait()
        if self.inputs is not None:
            self.inputs.refuse_edited_code()
        self._begin_saving(step, model, optimizer, note)
        if self.inputs is not None:
            try:
                self.inputs.refuse_edited_settings()
            except UserError:
                self.wait()
                raise

    def _begin_saving(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, note: dict
    ) -> None:
        tensors = sharded_state.collect_rank_state(model, optimizer)
        if any(sharded_state.is_sharded_tensor(value) for value in tensors.values()):
            self._start_writing(self._shard_writer(step, tensors, note))
            return
        if not current_ranks().first:
            return
        copied = {
            name: sharded_state.to_full_tensor(value).detach().cpu().clone()
            for name, value in tensors.items()
        }
        about = {"step": str(step), "note": json.dumps(note)}
        self._start_writing(lambda: write_tensors(self.path, copied, about))

    def wait(self) -> None:
        """Until what ``save`` began is written. Raises UserError where it could not be."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
        """Restore model and optimiser; return (steps done, note), (0, {}) without a checkpoint.

        Raises UserError where it is damaged or another model's, or ranks do not find the same.
        """
        there = next((path for path in (self.pointer, self.path) if path.exists()), None)
        check_equal_across_ranks("checkpoints", str(there and there.name))
        if there is None:
            return 0, {}
        if there == self.pointer:
            tensors, about = self._read_shards(model, optimizer)
        else:
            tensors, about = read_tensors(self.path)
        check_equal_across_ranks("checkpoints", about["step"])
        state = model.state_dict()
        weights = {}
        for prefixed, value in tensors.items():
            if prefixed.startswith("model."):
                name = prefixed.removeprefix("model.")
                weights[name] = sharded_state.shard_like(value, state.get(name, value))
        check_and_load_state_dict(model, weights, there, mend=AGAIN)
        sharded_state.restore_optimizer(optimizer, tensors)
        return int(about["step"]), json.loads(about["note"])

    def _read_shards(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensors, dict[str, Any]]:
        """Return what all ranks wrote, as this one holds it, and what the pointer says of it."""
        about = read_json(self.pointer, sealed=True)
        folder = self.folder / about["folder"]
        # the first looks, and all end alike: they read together
        damage = _find_damage(folder, about["files"]) if current_ranks().first else ""
        if damage := broadcast_text(damage):
            raise UserError(damage)
        state = model.state_dict()
        parameters = sharded_state.optimizer_parameters(optimizer)

        def of(name: str) -> Tensor:
            kind, _, rest = name.partition(".")
            if kind == "model":
                return state[rest]
            return parameters[int(rest.split(".")[0])].detach()

        return sharded_state.read_distributed_checkpoint(folder, of), about

    def _start_writing(self, write: Callable[[], None]) -> None:
        def kept() -> None:
            try:
                write()
            except BaseException as error:
                self._failed = error

        self._writing = Thread(target=kept, name="checkpoint")
        self._writing.start()

    def _shard_writer(self, step: int, tensors: Tensors, note: dict) -> Callable[[], None]:
        """Return what writes the shards of all ranks, and then the pointer to them."""
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        target = self.folder / f"sharded-{step}"
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied: Any = stager.stage(
            {name: sharded_state.at_least_1d(value) for name, value in tensors.items()}
        )
        stager.close()

        def write() -> None:
            writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
            try:
                if current_ranks().first:  # a killed process's part: all shards in it would be read
                    shutil.rmtree(target, ignore_errors=True)
                distributed.barrier(self._group)
                save(copied, storage_writer=writer, process_group=self._group)
            except (Exception, CheckpointException) as error:
                shutil.rmtree(target, ignore_errors=True)  # a part of it is of no use
                why = sharded_state.short_error(error)
                if "Errno" not in why and "os error" not in why:  # no file's, so another rank's end
                    raise RuntimeError(f"{target}: could not be written ({why})") from error
                size = sum(sharded_state.local_shard(value).nbytes for value in copied.values())
                free = shutil.disk_usage(self.folder).free
                takes = f"could not be written ({why}): it takes {size:,} bytes a rank"
                raise UserError(f"{target}: {takes}; {free:,} are free; {UNTOUCHED}") from error
            if not current_ranks().first:
                return
            about = {"folder": target.name, "step": str(step), "note": json.dumps(note)}
            about |= {"files": {file.name: file_checksum(file) for file in target.iterdir()}}
            write_sealed(self.pointer, about)
            for old in self.folder.glob("sharded-*"):
                if old != target:
                    shutil.rmtree(old)

        return write


def _find_damage(folder: Path, checksums: dict[str, str]) -> str:
    """Return what is wrong with the files of a sharded checkpoint; "" where nothing is."""
    for name, digest in checksums.items():
        if not (folder / name).is_file() or file_checksum(folder / name) != digest:
            return f"{folder / name}: damaged, or not there; {AGAIN}"
    return ""
