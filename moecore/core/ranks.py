"""The processes that share one training: how many there are, which this is, and their sums.

A launcher (torchrun, srun, ``python -m moecore.run.local_ranks``) sets RANK, WORLD_SIZE and where
they meet; without them there is one process and nothing here does anything. Every rank sees the
same random numbers, those of the whole batch, and takes its own rows: so the number of ranks
changes a training by rounding alone.

B images of the whole batch, b = B / ranks of one rank.
"""

import contextlib
import hashlib
import os
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from moecore.core.files import UserError
from moecore.core.ranks import RankWatch, announced_meeting

PATIENCE = timedelta(hours=6)  # the others wait while the first looks at what was trained
FAILURE_PATIENCE = timedelta(seconds=10)  # in which ranks that fail alike, unmet, have failed
MEETING = "MOECORE_MEETING"  # a file where ranks of one machine meet, in place of a port


class Ranks(NamedTuple):
    """This process among all that train together."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Return whether this is the one that writes files."""
        return self.rank == 0

    def rows(self, batch: int) -> Tensor | None:
        """Return its places in a batch, (b,) int64; None for all.

        Raises UserError where the ranks would not have as many each.
        """
        if self.size == 1:
            return None
        if batch % self.size:
            allowed = f"a multiple of {self.size}, so that all ranks have as many images"
            raise UserError(f"batch is {batch}, and {self.size} ranks share it; allowed: {allowed}")
        own = batch // self.size
        return torch.arange(self.rank * own, (self.rank + 1) * own)


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def has_process_group() -> bool:
    """Return whether there is a process group."""
    return distributed.is_available() and distributed.is_initialized()


def current_ranks() -> Ranks:
    """This process; the only one where nothing was joined."""
    if not has_process_group():
        return Ranks()
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def join_ranks() -> None:
    """Meet the other ranks, as the launcher's environment says; nothing without one.

    On one machine they meet in a file, or, under torchrun, at its address; gloo and NCCL are bound
    to the loopback where all ranks are on it.
    """
    if not is_launched() or has_process_group():
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if torch.cuda.is_available() and os.environ.get("MOECORE_DEVICE", "cuda") != "cpu":
        torch.cuda.set_device(local % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    _MeetingPlace.store = _find_store(rank, size, PATIENCE)
    _MeetingPlace.watch = RankWatch(_MeetingPlace.store, rank, size)
    _MeetingPlace.watch.start()
    distributed.init_process_group(
        backend, timeout=PATIENCE, world_size=size, rank=rank, store=_MeetingPlace.store
    )


def _find_store(rank: int, size: int, patience: timedelta) -> distributed.Store:
    meeting = os.environ.get(MEETING)
    if not meeting and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        lacking = "not where they meet (MASTER_ADDR, MASTER_PORT)"
        problem = f"RANK and WORLD_SIZE say that this is one of {size} ranks, but {lacking}"
        ways = "`python -m moecore.run.local_ranks`, torchrun, or a launcher (docs/cluster.md)"
        raise UserError(f"ranks: {problem}; start them by {ways}")
    where = f"file://{meeting}" if meeting else "env://"
    said = meeting or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with announced_meeting(rank, size, said):
        return next(distributed.rendezvous(where, rank, size, timeout=patience))[0]


class _MeetingPlace:
    """Where the ranks met, and count what happened."""

    store: distributed.Store | None = None
    watch: RankWatch | None = None


def print_failure_once(text: str) -> None:
    """Print ``text`` to stderr, on the first of the ranks that fail; the others wait until it has.

    Ranks that fail before they met meet for this. Where that is not possible in ten seconds, each
    says it: twice is better than not at all.
    """
    try:
        here = _MeetingPlace.store or _find_store(
            int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), FAILURE_PATIENCE
        )
        first = here.add("failed", 1) == 1
    except (RuntimeError, UserError):  # the others are not there, or no longer, or nowhere
        here, first = None, True
    if first:
        print(text, file=sys.stderr, flush=True)
    if here is None:
        return
    with contextlib.suppress(RuntimeError):  # the others may end in between: all is said
        if first:
            here.add("said", 1)
        else:
            _wait_for_count(here, "said", 1)
        if _MeetingPlace.store is None and os.environ["RANK"] == "0":  # where the others ask
            _wait_for_count(here, "failed", int(os.environ["WORLD_SIZE"]))


def check_equal_across_ranks(what: str, text: str) -> None:
    """Raise UserError, on every rank, where ``text`` is not the same on all of them."""
    if not has_process_group():
        return
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    ends = torch.tensor([digest, -digest])
    distributed.all_reduce(ends, distributed.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        _wait_for_all_ranks()
        mend = "start all of them in one folder, or in copies of the same state"
        raise UserError(f"ranks: found {what} that differ between ranks; {mend}")


def _wait_for_all_ranks() -> None:
    """Until every rank is here: one that ends earlier would break off another's last sum."""
    if _MeetingPlace.store is not None:
        _MeetingPlace.store.add("know", 1)
        _wait_for_count(_MeetingPlace.store, "know", current_ranks().size)


def _wait_for_count(store: distributed.Store, what: str, number: int) -> None:
    """Until ``number`` were counted, ten seconds at most."""
    until = time.monotonic() + FAILURE_PATIENCE.total_seconds()
    while store.add(what, 0) < number and time.monotonic() < until:
        time.sleep(0.01)


def leave_ranks() -> None:
    """End the process group, where there is one."""
    if _MeetingPlace.watch is not None:
        _MeetingPlace.watch.stop()
        _MeetingPlace.watch = None
    if has_process_group():
        distributed.destroy_process_group()


def exit_other_ranks() -> None:
    """End every rank but the first: what follows is done once. Nothing without ranks."""
    if not current_ranks().first:
        leave_ranks()
        sys.exit(0)
    leave_ranks()


def total_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, with gradient: some losses are not linear in them.

    Every rank then holds the same loss, and its gradient arrives times the number of ranks, which
    the mean of all gradients takes out again.
    """
    return _AllReduce.apply(values) if has_process_group() else values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean of ``values`` over all ranks, a scalar with gradient.

    Ranks may have unequally many values, as they have words of captions: a mean of their means
    would then depend on the number of ranks.
    """
    if not has_process_group():
        return values.mean()
    count = values.new_tensor(float(values.numel()))
    total = total_over_ranks(torch.stack([values.sum(), count]))
    return total[0] / total[1]


def holds_on_all_ranks(holds: Tensor) -> bool:
    """Return whether a condition, a bool on the device, holds on every rank."""
    if has_process_group():
        holds = holds.int()
        distributed.all_reduce(holds, distributed.ReduceOp.MIN)
    return bool(holds)


def all_gather_rows(own: Tensor) -> Tensor:
    """Return the rows (B, …) of the whole batch from (b, …) of this rank; without gradient."""
    if not has_process_group():
        return own
    parts = [own.new_empty(own.shape) for _ in range(current_ranks().size)]
    distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def total_over_shards(part: Tensor, of: Tensor) -> Tensor:
    """The sum of what each rank found of its ``local_shard`` of the parameter ``of``.

    Its gradient is that of this rank's part, which no other rank has: it is not averaged.
    """
    mesh = getattr(of, "device_mesh", None)
    if mesh is None:
        return part
    total = part.detach().clone()
    distributed.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return part + (total - part.detach())


def broadcast_text(text: str) -> str:
    """The first rank's text, on all of them."""
    if not has_process_group():
        return text
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor(len(encoded))
    distributed.broadcast(length, 0)
    if not current_ranks().first:
        encoded = torch.empty(int(length), dtype=torch.uint8)
    distributed.broadcast(encoded, 0)
    return bytes(encoded.tolist()).decode()


class _AllReduce(Function):
    """The sum over ranks; its gradient is summed over ranks too."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _AllReduce.apply(*grads)
