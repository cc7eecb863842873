"""Start one training as several ranks of this machine, which meet in a file, not at a port.

Then gloo and NCCL listen on ports of 127.0.0.1.

``python -m moecore.run.local_ranks 2 -m moecore.stages.pretrain vmoe 0``
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moecore.core.operating_system import set_parent_death_signal
from moecore.run.stage_entry import MEETING, end_with_parent, has_failed_rank

LAUNCHED = "MOECORE_LAUNCHED"  # tasks per machine; set for what a launcher started
POLL = 0.05  # seconds
GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def run_local_ranks(size: int, words: Sequence[str]) -> int:
    """Run ``python WORDS`` as ``size`` ranks; the exit code of the first that fails, or 0.

    Where one fails, or this process is told to end, all others are ended.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting")
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), MEETING: str(meeting)}
        running: list[subprocess.Popen] = []
        try:
            for rank in range(size):
                own = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, *words]
                begin = set_parent_death_signal
                running.append(subprocess.Popen(command, env=own, preexec_fn=begin))
            code = wait_for_exit_code(running)
        finally:
            end_ranks(running)
        # one that ended because another had failed may have been seen first
        if code and has_failed_rank(meeting):
            return 1
        return code


def wait_for_exit_code(running: Sequence[subprocess.Popen]) -> int:
    """Wait until one has failed, or all have ended well: its exit code, or 0."""
    while True:
        codes = [one.poll() for one in running]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        for rank, code in failed.items():
            if code > 0:
                return code
            print(f"rank {rank} was ended by signal {-code}", file=sys.stderr)
            return 128 - code
        if None not in codes:
            return 0
        time.sleep(POLL)


def end_ranks(running: Sequence[subprocess.Popen]) -> None:
    """End what still runs: SIGTERM, and SIGKILL for what does not follow."""
    for one in running:
        one.terminate()
    until = time.monotonic() + GRACE
    for one in running:
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def rank_variables_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank, from those of a SLURM task; {} where there are none, or one task."""
    size = int(environment.get("SLURM_NTASKS", "1"))
    if "RANK" in environment or "SLURM_PROCID" not in environment or size == 1:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": environment[LAUNCHED],
    }


def thread_variables_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return as many threads as the task has cores: not every cluster binds tasks to theirs."""
    cores = environment.get("SLURM_CPUS_PER_TASK")
    if cores is None or "MOECORE_THREADS" in environment:
        return {}
    return {"MOECORE_THREADS": cores, "OMP_NUM_THREADS": cores}


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        print(
            "usage: python -m moecore.run.local_ranks N -m moecore.stages.STAGE …", file=sys.stderr
        )
        sys.exit(2)
    end_with_parent()
    sys.exit(run_local_ranks(int(sys.argv[1]), sys.argv[2:]))
