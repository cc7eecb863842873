"""Checkpoints: a killed training run is resumed from the last one.

Weights, optimizer and step are enough: views, order and noise are functions of (seed, step). A
thread writes the files, atomically and with a checksum; none is a pickle. The first rank writes one
safetensors file, or, for sharded parameters, every rank its own (torch.distributed.checkpoint). Any
number of ranks can read it.
"""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
    """The inputs of a training; an edit during the run is a UserError."""

    def refuse_edited_code(self) -> None: ...

    def refuse_edited_settings(self) -> None: ...


class Checkpoint:
    """The checkpoint of one run, in a folder that outlives the process."""

    def __init__(self, folder: Path, inputs: Inputs | None = None) -> None:
        """Set the folder. inputs: checked at every ``save``, on the first rank; None: never."""
        self.folder = folder
        self.inputs = inputs
        self.path = folder / "checkpoint.safetensors"
        self.pointer = folder / "sharded.json"  # names the folder of a sharded checkpoint
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._group: Any = None  # process group of the saving thread

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, note: dict
    ) -> None:
        """Copy the state after ``step`` steps, with a ``note``; a thread replaces the file."""
        self.wait()
        if self.inputs is not None:  # first: the new code may have computed the state
            self.inputs.refuse_edited_code()
        tensors = sharded_state.collect_rank_state(model, optimizer)
        if any(sharded_state.is_sharded_tensor(value) for value in tensors.values()):
            self._writing = self._thread.submit(self._shard_writer(step, tensors, note))
        elif current_ranks().first:
            copied = {
                name: sharded_state.to_full_tensor(value).detach().cpu().clone()
                for name, value in tensors.items()
            }
            about = {"step": str(step), "note": json.dumps(note)}
            self._writing = self._thread.submit(write_tensors, self.path, copied, about)
        if self.inputs is not None:
            try:
                self.inputs.refuse_edited_settings()
            except UserError:
                self.wait()  # the training resumes here once the edit is undone
                raise

    def wait(self) -> None:
        """Wait until the last ``save`` is written. Raises UserError if it could not be."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
        """Restore model and optimizer; return (steps done, note), (0, {}) without a checkpoint."""
        path = next((path for path in (self.pointer, self.path) if path.exists()), None)
        check_equal_across_ranks("checkpoints", str(path and path.name))
        if path is None:
            return 0, {}
        if path == self.pointer:
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
        check_and_load_state_dict(model, weights, path, mend=AGAIN)
        sharded_state.restore_optimizer(optimizer, tensors)
        return int(about["step"]), json.loads(about["note"])

    def _read_shards(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensors, dict[str, Any]]:
        """Return name → tensor, sharded as on this rank, and the content of sharded.json."""
        about = read_json(self.pointer, sealed=True)
        folder = self.folder / about["folder"]
        damaged = ""
        if current_ranks().first:  # for all, so that all raise or all read together
            for name, digest in about["files"].items():
                if not (folder / name).is_file() or file_checksum(folder / name) != digest:
                    damaged = str(folder / name)
        if damaged := broadcast_text(damaged):
            raise UserError(f"{damaged}: damaged or missing; {AGAIN}")
        state = model.state_dict()
        parameters = sharded_state.optimizer_parameters(optimizer)

        def target_of(name: str) -> Tensor:
            kind, _, rest = name.partition(".")
            if kind == "model":
                return state[rest]
            return parameters[int(rest.split(".")[0])].detach()

        return sharded_state.read_distributed_checkpoint(folder, target_of), about

    def _shard_writer(self, step: int, tensors: Tensors, note: dict) -> Callable[[], None]:
        """Return a function that writes the shards of all ranks, and then the pointer to them."""
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
                if current_ranks().first:
                    # A killed process may have left shards here, which would be read too.
                    shutil.rmtree(target, ignore_errors=True)
                distributed.barrier(self._group)
                save(copied, storage_writer=writer, process_group=self._group)
            except (Exception, CheckpointException) as error:
                shutil.rmtree(target, ignore_errors=True)  # an incomplete checkpoint is useless
                failures = getattr(error, "failures", {})  # with tracebacks, which are left out
                lines = [f"rank {rank}: {failures[rank][0]}" for rank in sorted(failures)]
                reason = "; ".join(lines) or str(error)
                if "Errno" not in reason and "os error" not in reason:  # another rank has ended
                    raise RuntimeError(f"{target}: could not be written ({reason})") from error
                size = sum(sharded_state.local_shard(value).nbytes for value in copied.values())
                free = shutil.disk_usage(self.folder).free
                raise UserError(
                    f"{target}: could not be written ({reason}): it takes {size:,} bytes per rank; "
                    f"{free:,} are free; {UNTOUCHED}"
                ) from error
            if not current_ranks().first:
                return
            about = {"folder": target.name, "step": str(step), "note": json.dumps(note)}
            about |= {"files": {file.name: file_checksum(file) for file in target.iterdir()}}
            write_sealed(self.pointer, about)
            for old in self.folder.glob("sharded-*"):
                if old != target:
                    shutil.rmtree(old)

        return write
