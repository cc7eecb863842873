"""Run one training as several processes (ranks) on this machine, which connect through a file.

With a file, gloo and NCCL listen on 127.0.0.1; torchrun listens on all interfaces.

``python -m moecore.run.local_ranks 2 -m moecore.stages.pretrain vmoe 0``
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from moecore.core.files import set_parent_death_signal
from moecore.run.stage_entry import MEETING_ENV, end_with_parent

POLL = 0.05  # seconds
GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def run_local_ranks(size: int, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENTS`` as ``size`` processes; return the first failed exit code, or 0."""
    # If a rank fails, or this process gets SIGTERM, all ranks are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        shared[MEETING_ENV] = str(Path(folder, "meeting"))
        running: list[psutil.Popen] = []
        try:
            for rank in range(size):
                environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, *arguments]
                begin = set_parent_death_signal
                running.append(psutil.Popen(command, env=environment, preexec_fn=begin))
            return wait_for_exit_code(running)
        finally:
            for process in running:
                with suppress(psutil.NoSuchProcess):  # it has ended
                    process.terminate()
            for process in psutil.wait_procs(running, GRACE)[1]:  # those that still run
                process.kill()
                process.wait()


def wait_for_exit_code(running: Sequence[psutil.Popen]) -> int:
    """Wait for all processes, or for the first failure; return its exit code, or 0."""
    while True:
        codes = [process.poll() for process in running]
        for rank, code in enumerate(codes):
            if code and code < 0:
                print(f"rank {rank} was ended by signal {-code}", file=sys.stderr)
                return 128 - code
        if None not in codes or any(codes):
            # 1, an error, comes before 143, the code of a rank that ended because of it.
            return min((code for code in codes if code), default=0)
        time.sleep(POLL)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        usage = "usage: python -m moecore.run.local_ranks N -m moecore.stages.STAGE …"
        print(usage, file=sys.stderr)
        sys.exit(2)
    end_with_parent()
    sys.exit(run_local_ranks(int(sys.argv[1]), sys.argv[2:]))
