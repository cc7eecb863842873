"""What ``dvc repro`` would run, why, and how long it took the last time. ``python -m moecore.plan``"""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

from moecore.code_hashes import code_hashes
from moecore.files import StageError, read_json
from moecore.history_file import NAME, read_lines
from moecore.progress import clock

QUICK = ("code", "code_of_section", "code_of_stage")  # they hash source files, in a tenth of a second each


class Planned(NamedTuple):
    """A stage that would run; seconds: the last time, or the mean of its siblings, or None where none has ever run."""

    stage: str
    reasons: tuple[str, ...]
    seconds: float | None


def plan(status: Mapping[str, list], edges: list[tuple[str, str]], seconds: Mapping[str, float], ends: Collection[str] = ()) -> list[Planned]:
    """The stages that would run, in an order in which they can: those that changed, and all downstream of them.

    status: as ``dvc status --json`` gives it; edges: (before, after) of the pipeline; seconds: of past runs by stage;
    ends: stages that will write what is there already, so that nothing runs because of them.
    What DVC's run cache restores instead of running cannot be known beforehand.
    """
    reasons = {stage: found for stage, entries in status.items() if (found := tuple(_reasons(entries)))}
    planned = []
    for stage in _ordered({stage for edge in edges for stage in edge} | set(reasons), edges):
        above = [before for before, after in edges if after == stage and before in reasons and before not in ends]
        if stage not in reasons and above:
            reasons[stage] = (f"after {_short(above)}",)
        if stage in reasons:
            planned.append(Planned(stage, reasons[stage], _estimate(stage, seconds)))
    return planned


def _reasons(entries: list) -> list[str]:
    """DVC's entries, such as ``{"changed deps": {"params.yaml": {"pretrain.epochs": "modified"}}}``, in words."""
    words = []
    for entry in entries:
        for what, changes in entry.items() if isinstance(entry, dict) else [(str(entry), {})]:
            kind = what.removeprefix("changed ").rstrip("s")
            for path, change in changes.items() if isinstance(changes, dict) else ():
                words += [f"{key} {state}" for key, state in change.items()] if isinstance(change, dict) else [f"{kind} {path} {change}"]
            if not isinstance(changes, dict) or not changes:
                words.append(what)
    return list(dict.fromkeys(words))


def _ordered(stages: set[str], edges: list[tuple[str, str]]) -> list[str]:
    waiting, order = {stage: {before for before, after in edges if after == stage} for stage in sorted(stages)}, []
    while waiting:
        ready = [stage for stage, above in waiting.items() if not above & set(waiting)]
        order += ready
        waiting = {stage: above for stage, above in waiting.items() if stage not in ready}
    return order


def _estimate(stage: str, seconds: Mapping[str, float]) -> float | None:
    siblings = [value for name, value in seconds.items() if name.split("@")[0] == stage.split("@")[0]]
    return seconds.get(stage, fmean(siblings) if siblings else None)


def _short(stages: list[str]) -> str:
    return ", ".join(stages[:2]) + (f" and {len(stages) - 2} more" if len(stages) > 2 else "")


def locked(folder: Path = Path()) -> dict[str, dict]:
    """The stages of a dvc.lock as they last ran; none where there is no such file."""
    lock, loader = folder / "dvc.lock", getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return (yaml.load(lock.read_text(encoding="utf-8"), Loader=loader) or {}).get("stages", {}) if lock.is_file() else {}


def settled(status: Mapping[str, list]) -> set[str]:
    """Of the changed stages those that hash code, and will find the hashes that their file holds: an edit elsewhere ends there."""
    ran, found = locked(), set()
    for stage, entries in status.items():
        words = ran.get(stage, {}).get("cmd", "").split()
        if words[:3] == ["python", "-m", "stages.code"] and not any("changed command" in entry or "changed outs" in entry for entry in entries):
            path, hashes = code_hashes(*words[3:])
            if path.is_file() and read_json(path) == hashes:
                found.add(stage)
    return found


def past_seconds(folder: Path = Path("artifacts/history")) -> dict[str, float]:
    """Seconds of the finished runs by DVC stage; for runs outside DVC by the name that DVC would give them."""
    found = {}
    for file in sorted(folder.rglob(NAME)):
        header, *_, end = lines if len(lines := read_lines(file.parent)) > 1 else ({}, {})
        if end.get("status") == "FINISHED":
            item = "-".join(str(header[key]) for key in ("phase", "method", "seed") if header[key] is not None)
            found[header["dvc_stage"] or (f"{header['stage']}@{item}" if item else header["stage"])] = end["seconds"]
    return {name.split(":")[-1]: value for name, value in found.items()}


def dvc(*words: str) -> str:
    """What DVC prints. Raises StageError with its own words where it fails."""
    done = subprocess.run([sys.executable, "-m", "dvc", *words], capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"dvc {' '.join(words)}: {done.stderr.strip().removeprefix('ERROR: ')}")
    return done.stdout


def parse_dot(text: str) -> list[tuple[str, str]]:
    """(before, after) pairs of ``dvc dag --dot``."""
    return re.findall(r'"([^"]+)"\s*->\s*"([^"]+)"', text)


def asked() -> tuple[dict[str, list], list[tuple[str, str]]]:
    """DVC's status of every stage that changed, and the edges of the pipeline."""
    with ThreadPoolExecutor(2) as pool:
        status, graph = pool.map(lambda words: dvc(*words), (("status", "--json", "dvc.yaml"), ("dag", "--dot", "dvc.yaml")))
    return json.loads(status or "{}"), parse_dot(graph)


def main() -> None:
    status, edges = asked()
    planned = plan(status, edges, past_seconds(), settled(status))
    if not planned:
        print("Nothing would run: everything is up to date.")
        return
    from rich.console import Console
    from rich.table import Table

    hashing = [item for item in planned if item.stage.partition("@")[0] in QUICK]
    heavy = [item for item in planned if item not in hashing]
    table = Table("stage", "why", "last time", box=None, header_style="bold", padding=(0, 2))
    if hashing:
        reasons = dict.fromkeys(reason for item in hashing for reason in item.reasons)
        table.add_row(f"{len(hashing)} that hash code", "; ".join(list(reasons)[:3]), "")
    for item in heavy:
        more = f" (+{len(item.reasons) - 3})" if len(item.reasons) > 3 else ""
        table.add_row(item.stage, "; ".join(item.reasons[:3]) + more, clock(item.seconds) if item.seconds is not None else "?")
    Console().print(table, soft_wrap=True)
    unknown = sum(item.seconds is None for item in heavy)
    print(f"{len(heavy)} stages, about {clock(sum(item.seconds or 0 for item in heavy))}" + (f" and {unknown} that never ran" if unknown else ""))


if __name__ == "__main__":
    try:
        main()
    except StageError as error:
        sys.exit(str(error))
