"""Say who is waited for, where the ranks of a training have waited for one another for a minute.

A thread of each rank counts the collectives that its rank has begun. Where that number stands
still, it asks all ranks for theirs: who has begun fewer, or does not answer, is waited for.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread, Timer

from torch import distributed

from moecore.core.torch_internals import clone_store, count_begun_collectives

INTERVAL = 5.0  # seconds between two looks
QUESTION_AFTER = 40.0  # seconds without a new collective, until the others are asked
ANSWERS_AFTER = 60.0  # seconds, until their answers are read: they had time for several looks


@contextmanager
def announced_meeting(rank: int, size: int, where: str) -> Iterator[None]:
    """Print where this rank waits, if what is in the block, a search for the others, takes long."""
    said = f"rank {rank} of {size}: has waited {ANSWERS_AFTER:.0f} s for the others at {where}"
    timer = Timer(ANSWERS_AFTER, lambda: print(said, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RankWatch(Thread):
    """The thread of one rank, which ends with ``stop`` or with its process."""

    def __init__(
        self,
        store: distributed.Store,
        rank: int,
        size: int,
        count: Callable[[], int] = count_begun_collectives,
    ) -> None:
        """``store``: where the ranks meet; the thread has a connection of its own."""
        super().__init__(name="rank watch", daemon=True)
        self.store = clone_store(store)
        self.rank = rank
        self.size = size
        self.count = count
        self.answered = 0  # questions of any rank
        self.ended = Event()

    def run(self) -> None:
        """Answer every question; ask one where this rank has waited, and print what it learns."""
        with suppress(RuntimeError):  # the store or the group has ended, and so does the training
            begun, since, question = self.count(), time.monotonic(), None
            is_said = False
            while not self.ended.wait(INTERVAL):
                if (now := self.count()) != begun:
                    begun, since, question, is_said = now, time.monotonic(), None, False
                waited = time.monotonic() - since
                if question is None and waited >= QUESTION_AFTER:
                    question = self.answered
                    self.store.set(f"watch/{question}", "asked")
                while self.store.check([f"watch/{self.answered}"]):
                    answer = f"{begun} {os.getpid()} {platform.node()}"
                    self.store.set(f"watch/{self.answered}/{self.rank}", answer)
                    self.answered += 1
                if question is not None and waited >= ANSWERS_AFTER and not is_said:
                    self._print_late_ranks(begun, question)
                    is_said = True

    def stop(self) -> None:
        """End the thread."""
        self.ended.set()
        self.join(INTERVAL)

    def _print_late_ranks(self, begun: int, question: int) -> None:
        """Print who is waited for; of the ranks that wait, the first does it."""
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
            said = f"rank {self.rank} of {self.size}: has waited {ANSWERS_AFTER:.0f} s for {named}"
            print(f"{said}; {mend}", file=sys.stderr, flush=True)
