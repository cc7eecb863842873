"""What ``dvc repro`` would run, why, and how long it took the last time."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from moecore.core.files import UserError, explain_full_disk, read_json
from moecore.core.sources import CODE, ROOT
from moecore.pipeline.code_hashes import code_files
from moecore.run.history_file import HISTORY_FILE, read_dvc_locks, read_lines
from moecore.run.progress import format_duration
from moecore.study.reading.document import load_yaml

HASHING = "code"  # the stage that hashes the code; it takes a second
ALWAYS = "always changed"  # DVC's words for it in a study


class PlannedStage(NamedTuple):
    """A stage that would run.

    seconds: the last time, or the mean of its siblings, or None where none has ever run.
    """

    stage: str
    reasons: tuple[str, ...]
    seconds: float | None


class Pipeline(NamedTuple):
    """DVC's answer about a pipeline.

    status: of every stage that changed, as ``dvc status --json`` gives it; edges: (before, after).
    """

    status: Mapping[str, list]
    edges: list[tuple[str, str]]


def query_dvc() -> Pipeline:
    """Ask DVC which stages of the project in the working directory changed, and how they hang
    together.

    Raises UserError where DVC fails: with its own words, but for a damaged dvc.lock.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with explain_full_disk(Path(".dvc")), Repo() as repo:
            status = repo.status()
            edges = [
                (_stage_name(before.addressing), _stage_name(after.addressing))
                for after, before in repo.index.graph.edges
            ]
    except DvcException as error:
        read_dvc_locks()
        raise UserError(f"dvc: {error}") from None
    return Pipeline(status, edges)


def plan_stages(
    pipeline: Pipeline,
    seconds: Mapping[str, float],
    by_code: Mapping[str, tuple[str, ...]] | None = None,
) -> list[PlannedStage]:
    """The stages that would run, in a possible order: those that changed, and all downstream.

    seconds: of past runs by stage. by_code: stages that other hashes of code will mark as changed,
    with the reasons; where it is given, nothing else runs because of the stage ``code``.
    What DVC's run cache restores instead of running cannot be known beforehand.
    """
    status, edges = pipeline
    reasons = {
        _stage_name(stage): tuple(_describe_reasons(entries)) for stage, entries in status.items()
    }
    reasons = {stage: words for stage, words in reasons.items() if words}
    for stage, words in (by_code or {}).items():
        reasons[stage] = (*reasons.get(stage, ()), *words)
    planned = []
    for stage in sort_stages({stage for edge in edges for stage in edge} | set(reasons), edges):
        above = [before for before, after in edges if after == stage and before in reasons]
        if by_code is not None:
            above = [before for before in above if before != HASHING]
        if stage not in reasons and above:
            reasons[stage] = (f"after {_shorten_names(above)}",)
        if stage in reasons:
            planned.append(PlannedStage(stage, reasons[stage], _estimate_seconds(stage, seconds)))
    return planned


def stages_changed_by_code(
    pipeline: Pipeline, root: Path = ROOT
) -> dict[str, tuple[str, ...]] | None:
    """The stages whose code was edited, with the source files; None where that is not known.

    DVC sees only that the stage ``code`` has to run. The code is hashed here as that stage will,
    and compared with what it wrote the last time. root: of the code.
    """
    entries = pipeline.status.get(HASHING, [])
    if any(entry != ALWAYS and set(entry) != {"changed deps"} for entry in entries):
        return None
    params = Path(os.environ.get("MOECORE_PARAMS", "params.yaml"))
    edited = _edited_hash_files(params, root) if entries else {}
    edited_by_stage = {}
    for stage, ran in read_dvc_locks().items():
        paths = [Path(dep["path"]) for dep in ran.get("deps", ())]
        sources = [edited[file] for file in edited if any(_is_within(path, file) for path in paths)]
        if sources:
            edited_by_stage[stage] = tuple(
                dict.fromkeys(name for names in sources for name in names)
            )
    return edited_by_stage


def _edited_hash_files(params: Path, root: Path) -> dict[Path, tuple[str, ...]]:
    """The files of hashes that will change, with the source files that differ."""
    edits = {}
    for name, hashes in code_files(load_yaml(str(params)), root).items():
        file = CODE / name
        before = _read_hashes(file) if file.exists() else {}
        differing = {path for path, _ in before.items() ^ hashes.items()}
        if differing:
            edits[file] = tuple(f"{path} edited" for path in sorted(differing))
    return edits


def _read_hashes(file: Path) -> dict[str, str]:
    """Source file → its hash. Raises UserError where ``file`` holds something else."""
    hashes = read_json(file)
    if not isinstance(hashes, dict) or not all(isinstance(one, str) for one in hashes.values()):
        again = "delete it and run `dvc repro code` again"
        raise UserError(f"{file}: found no hashes of source files; {again}")
    return hashes


def _is_within(path: Path, file: Path) -> bool:
    return path == file or path in file.parents


def _stage_name(addressing: str) -> str:
    """A stage without the path of its dvc.yaml."""
    return addressing.split(":")[-1]


def _describe_reasons(entries: list) -> list[str]:
    """DVC's entries in words.

    Such as ``{"changed deps": {"params.yaml": {"pretrain.epochs": "modified"}}}``, or a mere
    ``"always changed"``.
    """
    words: list[str] = []
    for entry in entries:
        changes_by_kind = entry if isinstance(entry, dict) else {str(entry): None}
        for what, changes in changes_by_kind.items():
            words += (
                _describe_changes(what, changes)
                if isinstance(changes, dict) and changes
                else [what]
            )
    return list(dict.fromkeys(words))


def _describe_changes(what: str, changes: Mapping[str, Any]) -> Iterator[str]:
    kind = what.removeprefix("changed ").rstrip("s")
    for path, change in changes.items():
        if isinstance(change, dict):
            yield from (f"{key} {state}" for key, state in change.items())
        else:
            yield f"{kind} {path} {change}"


def sort_stages(stages: Iterable[str], edges: list[tuple[str, str]]) -> list[str]:
    """Each stage after those that it depends on."""
    chosen = sorted(stages)
    waiting = {stage: {before for before, after in edges if after == stage} for stage in chosen}
    order: list[str] = []
    while waiting:
        ready = [stage for stage, above in waiting.items() if not above & set(waiting)]
        order += ready
        waiting = {stage: above for stage, above in waiting.items() if stage not in ready}
    return order


def _estimate_seconds(stage: str, seconds: Mapping[str, float]) -> float | None:
    kind = stage.split("@")[0]
    siblings = [value for name, value in seconds.items() if name.split("@")[0] == kind]
    return seconds.get(stage, fmean(siblings) if siblings else None)


def _shorten_names(stages: list[str]) -> str:
    return ", ".join(stages[:2]) + (f" and {len(stages) - 2} more" if len(stages) > 2 else "")


def past_seconds(folder: Path = Path("artifacts/history")) -> dict[str, float]:
    """Seconds of the finished runs by DVC stage, or by the name that DVC would give them."""
    seconds = {}
    for file in sorted(folder.rglob(HISTORY_FILE)):
        lines = read_lines(file.parent)
        if len(lines) > 1 and lines[-1].get("status") == "FINISHED":
            seconds[_dvc_stage(lines[0])] = lines[-1]["seconds"]
    return seconds


def _dvc_stage(header: Mapping[str, Any]) -> str:
    """The DVC stage of a run, by the header of its history."""
    if header["dvc_stage"]:
        return _stage_name(header["dvc_stage"])
    item = [str(header[key]) for key in ("phase", "method", "seed") if header[key] is not None]
    return f"{header['stage']}@{'-'.join(item)}" if item else header["stage"]


def print_plan() -> None:
    """Print the plan as a table."""
    pipeline = query_dvc()
    planned = plan_stages(pipeline, past_seconds(), stages_changed_by_code(pipeline))
    heavy = [item for item in planned if item.stage != HASHING]
    if not heavy:
        print("Nothing would run: everything is up to date.")
        return
    width = max(len(item.stage) for item in heavy)
    for item in heavy:
        last = "?" if item.seconds is None else format_duration(item.seconds)
        print(f"{item.stage:<{width}}  {last:>8}  {_join_reasons(item.reasons)}")
    print(_total_line(heavy))


def _join_reasons(reasons: tuple[str, ...]) -> str:
    more = f" (+{len(reasons) - 2})" if len(reasons) > 2 else ""
    return "; ".join(reasons[:2]) + more


def _total_line(planned: list[PlannedStage]) -> str:
    seconds = format_duration(sum(item.seconds or 0 for item in planned))
    unknown = sum(item.seconds is None for item in planned)
    rest = f" and {unknown} of unknown length" if unknown else ""
    return f"{len(planned)} stages, about {seconds}{rest}"
