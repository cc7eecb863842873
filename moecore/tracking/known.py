"""What is known of a run in the store, the words that histories and runs share, who still runs."""

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

UID = "moecore.uid"
PARENT = "mlflow.parentRunId"
TOLD = "moecore.told"  # the parent that has the numbers of this finished run
COLOUR = "mlflow.runColor"
LEVEL = "level"  # "method": a parent; "shared": that of what all methods use; "stage": a child
COMPLETE = "moecore.complete"  # the run has all that its history holds
LONGEST_TAG = 5000
LONGEST_PARAM = 500


@dataclass
class Known:
    """A run of the store, as it was when it was last asked or changed."""

    id: str
    status: str
    started: float  # seconds since 1970
    ended: float | None
    tags: dict[str, str]

    @classmethod
    def of(cls, run: Any) -> "Known":
        """From MLflow's entity."""
        info = run.info
        ended = None if info.end_time is None else info.end_time / 1000
        return cls(info.run_id, info.status, info.start_time / 1000, ended, dict(run.data.tags))

    @property
    def complete(self) -> bool:
        return self.tags.get(COMPLETE) == "true"

    def tag(self, client: Any, tags: Mapping[str, Any]) -> None:
        """Set the tags that differ; those that are None are left as they are."""
        from mlflow.entities import RunTag

        changed = {
            name: str(value)[:LONGEST_TAG]
            for name, value in tags.items()
            if value is not None and self.tags.get(name) != str(value)[:LONGEST_TAG]
        }
        for part in parts(sorted(changed.items()), 100):
            client.log_batch(self.id, tags=[RunTag(*tag) for tag in part])
        self.tags |= changed

    def set_status(self, client: Any, status: str, when: float) -> None:
        """Set the status where it differs; ``when`` (seconds since 1970) it ended."""
        if status == "RUNNING":
            if status != self.status:
                client.update_run(self.id, status=status)
        elif status != self.status or self.ended is None or abs(self.ended - when) > 0.002:
            client.set_terminated(self.id, status, int(when * 1000))
            self.ended = when
        self.status = status

    def abandoned(self) -> bool:
        """True where it runs in the store, but its process on this host has gone."""
        if self.status != "RUNNING" or self.tags.get("host") != platform.node():
            return False
        return not runs(int(self.tags["pid"]), self.started)


def known_runs(client: Any, experiment: str) -> list[Known]:
    """The runs of an experiment that an import made."""
    known = []
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        every = [Known.of(run) for run in page]
        known += [run for run in every if UID in run.tags or LEVEL in run.tags]
        token = page.token
        if not token:
            return known


def run_name(header: Mapping[str, Any]) -> str:
    """``pretrain vmoe seed 0``."""
    words = [header["stage"], header["phase"], header["method"]]
    if header["seed"] is not None:
        words.append(f"seed {header['seed']}")
    return " ".join(word for word in words if word is not None)


def header_tags(header: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a run that its history's first line gives."""
    tags = {
        UID: header["uid"],
        LEVEL: "stage",
        "stage": header["stage"],
        "method": header["method"],
        "seed": header["seed"],
        "phase": header["phase"],
        "dvc.stage": header["dvc_stage"],
        "params_hash": header["params_hash"],
        "mlflow.source.git.commit": header["commit"],
        "git.dirty": None if header["dirty"] is None else str(header["dirty"]).lower(),
        "mlflow.source.name": header["command"],
        "host": header["host"],
        "pid": header["pid"],
        "python": header["python"],
    }
    return {name: str(value) for name, value in tags.items() if value is not None}


def shown(value: Any) -> str:
    """The value of a param as MLflow shows it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= LONGEST_PARAM:
        return text
    return text[: LONGEST_PARAM - 1] + "…"


def parts(items: list, size: int) -> Iterator[list]:
    """``items`` in pieces: MLflow limits what one call may bring."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def alive(lines: list[dict]) -> bool:
    """True while the last process of a history runs; one on another host is taken to run."""
    writer = next(line for line in reversed(lines) if "pid" in line)
    return writer["host"] != platform.node() or runs(writer["pid"], writer["t"])


def runs(pid: int, at: float) -> bool:
    """True while the process ``pid`` that was there ``at`` seconds since 1970 runs.

    Numbers of ended processes are used again: one that began later is another.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= at + 1
    except psutil.NoSuchProcess:
        return False
