"""The processes (ranks) that share one training, and collectives over them.

A launcher (torchrun, srun, ``python -m moecore.run.local_ranks``) sets RANK, WORLD_SIZE and the
meeting point; without it there is one process and every function here is trivial. All ranks draw
the random numbers of the whole batch and take their rows, so the number of ranks changes a training
only by rounding.

Shapes: B images of the whole batch, b = B / ranks images of one rank.
"""

import hashlib
import os
import platform
import sys
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread, Timer
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from moecore.core.files import UserError
from moecore.core.torch_internals import count_begun_collectives

PATIENCE = timedelta(hours=6)  # the other ranks wait while the first evaluates the model
FAILURE_PATIENCE = timedelta(seconds=10)  # until all ranks with the same error have failed
MEETING_ENV = "MOECORE_MEETING"  # a file where ranks of one machine meet, instead of a port

WATCH_INTERVAL = 5.0  # seconds between two checks of the watch
ASK_RANKS_AFTER = 40.0  # seconds without a new collective, until the other ranks are asked
ANSWERS_AFTER = 60.0  # the same, until answers are read: several checks later


class RankAndSize(NamedTuple):
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank, which writes the files."""
        return self.rank == 0

    def rows(self, batch: int) -> Tensor | None:
        """Return this rank's batch indices (b,); None for one rank; UserError if indivisible."""
        if self.size == 1:
            return None
        if batch % self.size:
            allowed = f"a multiple of {self.size}, so that all ranks have equally many images"
            raise UserError(f"batch is {batch}, and {self.size} ranks share it; allowed: {allowed}")
        share = batch // self.size
        return torch.arange(self.rank * share, (self.rank + 1) * share)


def has_process_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_and_size() -> RankAndSize:
    """Return this process's rank and the number of ranks; 0 and 1 without a process group."""
    if not has_process_group():
        return RankAndSize()
    return RankAndSize(distributed.get_rank(), distributed.get_world_size())


def join_ranks() -> None:
    """Join the process group that the environment names; do nothing without a launcher."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size <= 1 or "RANK" not in os.environ or has_process_group():
        return
    rank = int(os.environ["RANK"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == size:  # all ranks on one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if torch.cuda.is_available() and os.environ.get("MOECORE_DEVICE", "cuda") != "cpu":
        torch.cuda.set_device(local % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    _StoreAndWatch.store = _connect_to_store(PATIENCE)
    _StoreAndWatch.watch = LateRankReporter(_StoreAndWatch.store, rank, size)
    _StoreAndWatch.watch.start()
    distributed.init_process_group(
        backend, timeout=PATIENCE, world_size=size, rank=rank, store=_StoreAndWatch.store
    )


def _connect_to_store(patience: timedelta) -> distributed.Store:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = os.environ.get(MEETING_ENV)
    if not meeting and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        lacking = "not where they meet (MASTER_ADDR, MASTER_PORT)"
        problem = f"RANK and WORLD_SIZE say that this is one of {size} ranks, but {lacking}"
        ways = "`python -m moecore.run.local_ranks`, torchrun, or a launcher (docs/cluster.md)"
        raise UserError(f"ranks: {problem}; start them by {ways}")
    url = f"file://{meeting}" if meeting else "env://"
    place = meeting or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    message = f"rank {rank} of {size}: has waited {ANSWERS_AFTER:.0f} s for the others at {place}"
    timer = Timer(ANSWERS_AFTER, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        return next(distributed.rendezvous(url, rank, size, timeout=patience))[0]
    finally:
        timer.cancel()


class _StoreAndWatch:
    """The store in which ranks share counters, and this rank's thread that reports late ranks."""

    store: distributed.Store | None = None
    watch: "LateRankReporter | None" = None


def print_failure_once(text: str) -> None:
    """Print an error to stderr on the first failing rank; others wait for that (10 s at most)."""
    # Ranks that are not connected yet connect for this; if they cannot in ten seconds, each prints.
    try:
        store = _StoreAndWatch.store or _connect_to_store(FAILURE_PATIENCE)
        first = store.add("failed", 1) == 1
    except (RuntimeError, UserError):  # the other ranks cannot be reached
        store, first = None, True
    if first:
        print(text, file=sys.stderr, flush=True)
    if store is None:
        return
    with suppress(RuntimeError):  # other ranks may end meanwhile; the text is printed
        if first:
            store.add("said", 1)
        else:
            _wait_for_count(store, "said", 1)
        # Rank 0 hosts the store that the other ranks read.
        if _StoreAndWatch.store is None and os.environ["RANK"] == "0":
            _wait_for_count(store, "failed", int(os.environ["WORLD_SIZE"]))


def check_equal_across_ranks(what: str, text: str) -> None:
    """Raise UserError, naming ``what``, on every rank if ``text`` differs between ranks."""
    if not has_process_group():
        return
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    ends = torch.tensor([digest, -digest])
    distributed.all_reduce(ends, distributed.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        if _StoreAndWatch.store is not None:  # a rank that ends early aborts another's last sum
            _StoreAndWatch.store.add("know", 1)
            _wait_for_count(_StoreAndWatch.store, "know", rank_and_size().size)
        mend = "start all of them in one folder, or in copies of the same state"
        raise UserError(f"ranks: found {what} that differ between ranks; {mend}")


def _wait_for_count(store: distributed.Store, what: str, number: int) -> None:
    """Wait until the counter ``what`` reaches ``number``, ten seconds at most."""
    until = time.monotonic() + FAILURE_PATIENCE.total_seconds()
    while store.add(what, 0) < number and time.monotonic() < until:
        time.sleep(0.01)


def leave_ranks() -> None:
    if _StoreAndWatch.watch is not None:
        _StoreAndWatch.watch.stop()
        _StoreAndWatch.watch = None
    if has_process_group():
        distributed.destroy_process_group()


def exit_unless_first_rank() -> None:
    is_first = rank_and_size().is_first
    leave_ranks()
    if not is_first:
        sys.exit(0)


def total_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all ranks, with gradient."""
    # Every rank then has the same loss. Gradients are multiplied by the number of ranks, which the
    # mean over all ranks' gradients cancels.
    return _AllReduce.apply(values) if has_process_group() else values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean of ``values`` over all ranks, a scalar with gradient."""
    # Not a mean of means: ranks may have different numbers of values, such as words of captions.
    if not has_process_group():
        return values.mean()
    total = total_over_ranks(torch.stack([values.sum(), values.new_tensor(float(values.numel()))]))
    return total[0] / total[1]


def holds_on_all_ranks(holds: Tensor) -> bool:
    if has_process_group():
        holds = holds.int()
        distributed.all_reduce(holds, distributed.ReduceOp.MIN)
    return bool(holds)


def all_gather_rows(rows: Tensor) -> Tensor:
    """Return the rows (B, …) of all ranks, given this rank's rows (b, …); without gradient."""
    if not has_process_group():
        return rows
    parts = [rows.new_empty(rows.shape) for _ in range(rank_and_size().size)]
    distributed.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def total_over_shards(part: Tensor, whole: Tensor) -> Tensor:
    """Return ``part``, computed on a shard of ``whole``, summed over ranks; unsharded: ``part``."""
    # The gradient flows to this rank's part only: no other rank has the shard.
    mesh = getattr(whole, "device_mesh", None)
    if mesh is None:
        return part
    total = part.detach().clone()
    distributed.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return part + (total - part.detach())


def broadcast_text(text: str) -> str:
    if not has_process_group():
        return text
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor(len(encoded))
    distributed.broadcast(length, 0)
    if not rank_and_size().is_first:
        encoded = torch.empty(int(length), dtype=torch.uint8)
    distributed.broadcast(encoded, 0)
    return bytes(encoded.tolist()).decode()


class _AllReduce(Function):
    """Sum over ranks; also sum the gradient over ranks."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for ``backward``."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _AllReduce.apply(*grads)


# If the count does not change for a minute, it asks all ranks for theirs. A rank that has begun
# fewer, or that does not answer, is late. The thread ends with ``stop`` or with its process.
class LateRankReporter(Thread):
    """A thread that counts this rank's collectives and names late ranks for which others wait."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Prepare the thread, which opens a separate connection to the ranks' shared ``store``."""
        super().__init__(name="rank watch", daemon=True)
        self.store = store.clone()
        self.rank = rank
        self.size = size
        self.answered = 0  # questions of any rank
        self.ended = Event()

    def run(self) -> None:
        """Send this rank's count to others on request; name late ranks after a long wait."""
        with suppress(RuntimeError):  # the store or the group has ended, with the training
            begun = count_begun_collectives()
            since = time.monotonic()
            question = None
            is_reported = False
            while not self.ended.wait(WATCH_INTERVAL):
                if (now := count_begun_collectives()) != begun:
                    begun = now
                    since = time.monotonic()
                    question = None
                    is_reported = False
                waited = time.monotonic() - since
                if question is None and waited >= ASK_RANKS_AFTER:
                    question = self.answered
                    self.store.set(f"watch/{question}", "asked")
                while self.store.check([f"watch/{self.answered}"]):
                    answer = f"{begun} {os.getpid()} {platform.node()}"
                    self.store.set(f"watch/{self.answered}/{self.rank}", answer)
                    self.answered += 1
                if question is not None and waited >= ANSWERS_AFTER and not is_reported:
                    self._print_late_ranks(begun, question)
                    is_reported = True

    def stop(self) -> None:
        self.ended.set()
        self.join(WATCH_INTERVAL)

    def _print_late_ranks(self, begun: int, question: int) -> None:
        """Name late ranks (no answer to ``question``, or < ``begun``) on the first waiting rank."""
        late = {}
        for rank in range(self.size):
            key = f"watch/{question}/{rank}"
            if not self.store.check([key]):
                late[rank] = f"rank {rank}, which has not come or gives no sign of life"
                continue
            number, pid, host = self.store.get(key).decode().split(" ", 2)
            if int(number) < begun:
                late[rank] = f"rank {rank} (process {pid} on {host}), which runs"
        waiting = [rank for rank in range(self.size) if rank not in late]
        if late and waiting[:1] == [self.rank]:
            named = " and for ".join(late.values())
            mend = "where it hangs, end the run: it resumes from its checkpoint"
            waited = f"has waited {ANSWERS_AFTER:.0f} s for {named}"
            print(f"rank {self.rank} of {self.size}: {waited}; {mend}", file=sys.stderr, flush=True)
