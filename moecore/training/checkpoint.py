"""A training run that was killed goes on where it was, or one checkpoint earlier where the last is
damaged.

Weights, optimiser and position are enough: views, order and noise are functions of (seed, step), so
a run ends bit-equal to an uninterrupted one on CPU. Files are written by a thread while the
training goes on, whole or not at all; none of them is a pickle.

Where every rank holds all parameters, the first writes one safetensors file. Sharded parameters are
written by torch.distributed.checkpoint, a safetensors file per rank. Both are read by any number of
ranks.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed, nn

from moecore.core.files import UserError, file_checksum, read_json, whole_file, write_sealed
from moecore.core.ranks import broadcast_text, check_equal_across_ranks, current_ranks
from moecore.core.tensors import read_tensors, write_tensors
from moecore.training.sharded_state import (
    at_least_1d,
    collect_state,
    is_sharded,
    local_shard,
    optimizer_parameters,
    read_sharded,
    restore_optimizer,
    shard_like,
    short_error,
    state_mismatch,
    to_full_tensor,
)

AGAIN = "delete it and start the stage again"
UNTOUCHED = "what was there before is untouched. Free some space and start again"
Tensors = dict[str, Tensor]
Reader = Callable[[], tuple[Tensors, dict[str, Any]]]


class Checkpoint:
    """The checkpoint of one run, in a folder that outlives the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "checkpoint.safetensors"
        self.before = folder / "before.safetensors"  # the one before it
        self.pointer = folder / "sharded.json"  # names the folders of the last two sharded ones
        self._writing: Thread | None = None
        self._failed: BaseException | None = None
        self._group: Any = None  # the saving thread's own, beside the training's

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, note: dict
    ) -> None:
        """Replace the checkpoint; ``step`` steps are done, ``note`` is small JSON kept with them.

        Returns once all is copied; a thread writes. Raises UserError where the one before could not
        be written.
        """
        self.wait()
        tensors = collect_state(model, optimizer)
        if any(is_sharded(value) for value in tensors.values()):
            self._start_writing(self._shard_writer(step, tensors, note))
            return
        if not current_ranks().first:
            return
        copied = {
            name: to_full_tensor(value).detach().cpu().clone() for name, value in tensors.items()
        }
        about = {"step": str(step), "note": json.dumps(note)}
        self._start_writing(lambda: self._replace(copied, about))

    def wait(self) -> None:
        """Until what ``save`` began is written. Raises UserError where it could not be."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
        """Restore model and optimiser; returns (steps done, note), or (0, {}) where there is no
        checkpoint.

        Of a damaged one, or another model's, it is said, and the one before is taken. Raises
        UserError where that is no better, or not there (files are written atomically: only a
        failing disk damages them), and where ranks do not find the same.
        """
        there = collect_state(model, optimizer)
        names = (self.pointer, self.path, self.before)
        check_equal_across_ranks("checkpoints", str([name.name for name in names if name.exists()]))
        if not (readers := self._checkpoint_readers(model, optimizer)):
            return 0, {}
        tensors, position = read_first_undamaged(readers)
        check_equal_across_ranks("checkpoints", str(position["step"]))
        weights = {name: value for name, value in tensors.items() if name.startswith("model.")}
        model.load_state_dict(
            {
                name.removeprefix("model."): shard_like(weights[name], there[name])
                for name in weights
            }
        )
        restore_optimizer(optimizer, tensors)
        return position["step"], position["note"]

    def _replace(self, tensors: Tensors, about: dict[str, str]) -> None:
        """Keep the last as the one before, and write the new one in its place."""
        for path in (self.path, self.before):
            if path.is_dir():
                raise UserError(f"{path}: a folder, in the place of a checkpoint; {AGAIN}")
        if self.path.exists():
            with whole_file(self.before) as spare:
                try:
                    os.link(self.path, spare)
                except OSError:  # a file system without links
                    shutil.copyfile(self.path, spare)
        write_tensors(self.path, tensors, about)

    def _checkpoint_readers(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[Reader]:
        """Return what reads each checkpoint that is there, the last one first."""
        if not self.pointer.exists():
            files = [path for path in (self.path, self.before) if path.exists()]
            return [
                _matching_reader(path, partial(read_tensors, path), model, optimizer)
                for path in files
            ]

        def sharded(about: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
            # all ranks read the one that the first finds whole: they read it together
            whole = broadcast_text(self._find_damage(about) if current_ranks().first else "")
            if whole:
                raise UserError(whole)
            return read_sharded(self.folder / about["folder"], of), about

        parameters = optimizer_parameters(optimizer)
        state = model.state_dict()

        def of(name: str) -> Tensor:
            kind, _, rest = name.partition(".")
            if kind == "model":
                return state[rest]
            return parameters[int(rest.split(".")[0])].detach()

        last = read_json(self.pointer, sealed=True)
        each = [last] if last["before"] is None else [last, last["before"]]
        return [
            _matching_reader(
                self.folder / about["folder"], partial(sharded, about), model, optimizer
            )
            for about in each
        ]

    def _find_damage(self, about: dict[str, Any]) -> str:
        """Return what is wrong with the files of a sharded checkpoint; "" where nothing is."""
        folder = self.folder / about["folder"]
        for name, digest in about["files"].items():
            if not (folder / name).is_file() or file_checksum(folder / name) != digest:
                return f"{folder / name}: damaged, or not there; {AGAIN}"
        return ""

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
        copied: Any = stager.stage({name: at_least_1d(value) for name, value in tensors.items()})
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
                why = short_error(error)
                if "Errno" not in why and "os error" not in why:  # no file's, so another rank's end
                    raise RuntimeError(f"{target}: could not be written ({why})") from error
                size = sum(local_shard(value).nbytes for value in copied.values())
                free = shutil.disk_usage(self.folder).free
                takes = f"could not be written ({why}): it takes {size:,} bytes a rank"
                raise UserError(f"{target}: {takes}; {free:,} are free; {UNTOUCHED}") from error
            if not current_ranks().first:
                return
            last = read_json(self.pointer, sealed=True) if self.pointer.exists() else None
            about = {"folder": target.name, "step": str(step), "note": json.dumps(note)}
            about |= {"files": {file.name: file_checksum(file) for file in target.iterdir()}}
            kept = None if last is None else last | {"before": None}
            write_sealed(self.pointer, about | {"before": kept})
            for old in self.folder.glob("sharded-*"):
                if old != target and (kept is None or old.name != kept["folder"]):
                    shutil.rmtree(old)

        return write


def read_first_undamaged(readers: Sequence[Reader]) -> tuple[Tensors, dict[str, Any]]:
    """Return what the first reader reads that meets no damage; report the damaged ones. Raise the
    last one's UserError.
    """
    for read in readers[:-1]:
        try:
            return read()
        except UserError as error:
            if current_ranks().first:
                print(f"{error}. The checkpoint before it is taken", file=sys.stderr)
    return readers[-1]()


def _matching_reader(
    path: Path, read: Reader, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Reader:
    """Return what reads a checkpoint, its step and note as they were before they were text; its
    UserError where it is another model's, before anything of the model is replaced.
    """

    def fitting() -> tuple[Tensors, dict[str, Any]]:
        tensors, about = read()
        why = state_mismatch(tensors, model, optimizer)
        step, note = -1, None
        with suppress(KeyError, ValueError, RecursionError):  # it is said below
            step, note = int(about["step"]), json.loads(about["note"])
        if not why and (step < 0 or not isinstance(note, dict)):
            why = "its step and note are not as they are written"
        if why:
            raise UserError(f"{path}: holds no checkpoint of this training ({why}); {AGAIN}")
        return tensors, {"step": step, "note": note}

    return fitting
