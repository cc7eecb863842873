"""Who is said to be waited for, and how many collectives ranks have begun."""

import os
import re
import subprocess
import sys
import threading

import psutil
import pytest
from torch.distributed import FileStore

from moecore.core import ranks
from moecore.core.source_layout import ROOT

HANGING = """
import os, sys, time, torch
from torch import distributed
from moecore.core import ranks
from moecore.core.ranks import join_ranks, leave_ranks

ranks.INTERVAL, ranks.QUESTION_AFTER, ranks.ANSWERS_AFTER = 0.05, 0.2, 1.0
join_ranks()
distributed.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    sys.stdin.read()
distributed.all_reduce(torch.ones(1))
leave_ranks()
"""


@pytest.mark.parametrize(
    ("rank", "begun", "answers", "said"),
    [
        (0, 5, [5, 3, 5], "rank 0 of 3: has waited 60 s for rank 1 (process 101 on here), which"),
        (2, 5, [5, 3, 5], ""),  # rank 0 says it
        (1, 5, [3, 5, 5], "rank 1 of 3: has waited 60 s for rank 0 (process 100 on here), which"),
        (0, 5, [5, None, 5], "rank 0 of 3: has waited 60 s for rank 1, which has not come or"),
        (2, 5, [4, None, 5], "for rank 0 (process 100 on here), which runs and for rank 1, which"),
        (0, 5, [5, 5, 5], ""),  # all compute
        (1, 3, [5, 3, 5], ""),  # the others wait for this one
    ],
)
def test_ranks_that_have_begun_fewer_collectives_are_late(
    tmp_path, capsys, rank, begun, answers, said
):
    watch = ranks.RankWatch(FileStore(str(tmp_path / "meeting"), 3), rank, 3)
    for number, answer in enumerate(answers):
        if answer is not None:
            watch.store.set(f"watch/0/{number}", f"{answer} {100 + number} here")
    watch._print_late_ranks(begun, 0)
    assert said in (printed := capsys.readouterr().err)
    assert printed.count("\n") == bool(said)


def test_a_hanging_rank_is_named_while_the_others_wait():
    words = ["-m", "moecore.run.local_ranks", "2", "-c", HANGING]
    process = subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()  # rank 1 hangs until it is read
    assert re.match(
        r"rank 0 of 2: has waited 1 s for rank 1 \(process \d+ on .*\), which runs", line
    )
    listening = [
        connection.laddr.ip
        for child in psutil.Process(process.pid).children(recursive=True)
        for connection in child.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}, "as docs/cluster.md says"
    _, rest = process.communicate()
    assert process.returncode == 0 and not rest


def test_a_meeting_that_takes_long_is_said(monkeypatch, capsys):
    def rendezvous(*_, **__):
        for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
            timer.join()
        yield ("the store",)

    monkeypatch.setattr(ranks, "ANSWERS_AFTER", 0.0)
    monkeypatch.setattr(ranks.distributed, "rendezvous", rendezvous)
    for name, value in ((ranks.MEETING, "there:1234"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert ranks._find_store(ranks.PATIENCE) == "the store"
    assert capsys.readouterr().err == "rank 1 of 2: has waited 0 s for the others at there:1234\n"
