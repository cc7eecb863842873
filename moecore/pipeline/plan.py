"""What ``dvc repro`` would run, why, and how long it took the last time."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from moecore.core.files import UserError, explain_file_errors, read_json
from moecore.core.source_layout import CODE, ROOT
from moecore.pipeline.code_hashes import hash_code_files
from moecore.run.history_file import HISTORY_FILE, read_dvc_locks, read_lines
from moecore.run.progress import format_duration
from moecore.study.document import load_yaml_document

HASHING = "code"  # the stage that hashes the code; it takes a second
ALWAYS = "always changed"  # DVC's words for it in a study
SHOWN = 2  # reasons, and stages above, that are named


class PlannedStage(NamedTuple):
    """A stage that would run.

    seconds: the last time, or the mean of its siblings, or None where none has ever run.
    """

    stage: str
    reasons: tuple[str, ...]
    seconds: float | None


class DvcStatus(NamedTuple):
    """DVC's answer about a pipeline.

    status: of every stage that changed, as ``dvc status --json`` gives it; edges: (before, after).
    """

    status: Mapping[str, list]
    edges: list[tuple[str, str]]


def query_pipeline_status() -> DvcStatus:
    """Ask DVC which stages of the working directory's project changed, and how they hang together.

    Raises UserError where DVC fails: with its own words, but for a damaged dvc.lock.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with explain_file_errors(Path(".dvc")), Repo() as repo:
            status = repo.status()
            edges = [
                (_stage_name(before.addressing), _stage_name(after.addressing))
                for after, before in repo.index.graph.edges
            ]
    except DvcException as error:
        read_dvc_locks()
        raise UserError(f"dvc: {error}") from None
    return DvcStatus(status, edges)


def plan_stages(
    pipeline: DvcStatus,
    seconds: Mapping[str, float],
    by_code: Mapping[str, tuple[str, ...]] | None = None,
) -> list[PlannedStage]:
    """Return the stages that would run, in a possible order: those that changed, and all after.

    seconds: of past runs by stage. by_code: stages that other hashes of code will mark as changed,
    with the reasons; where it is given, nothing else runs because of the stage ``code``.
    What DVC's run cache restores instead of running cannot be known beforehand.
    """
    reasons: dict[str, tuple[str, ...]] = {}
    for stage, entries in pipeline.status.items():
        if words := tuple(dict.fromkeys(_describe_changes(entries))):
            reasons[_stage_name(stage)] = words
    for stage, words in (by_code or {}).items():
        reasons[stage] = (*reasons.get(stage, ()), *words)
    planned = []
    for stage in sort_stages(reasons, pipeline.edges):
        above = [before for before, after in pipeline.edges if after == stage if before in reasons]
        if by_code is not None:
            above = [before for before in above if before != HASHING]
        if stage not in reasons and above:
            more = f" and {len(above) - SHOWN} more" if len(above) > SHOWN else ""
            reasons[stage] = (f"after {', '.join(above[:SHOWN])}{more}",)
        if stage in reasons:
            planned.append(PlannedStage(stage, reasons[stage], _estimate_seconds(stage, seconds)))
    return planned


def stages_changed_by_code(
    pipeline: DvcStatus, root: Path = ROOT
) -> dict[str, tuple[str, ...]] | None:
    """Return the stages whose code was edited, with the source files; None where that is not known.

    DVC sees only that the stage ``code`` has to run. The code is hashed here as that stage will,
    and compared with what it wrote the last time. root: of the code.
    """
    entries = pipeline.status.get(HASHING, [])
    if any(entry != ALWAYS and set(entry) != {"changed deps"} for entry in entries):
        return None
    params = Path(os.environ.get("MOECORE_PARAMS", "params.yaml"))
    edited = _edited_hash_files(params, root) if entries else {}
    present = {stage for edge in pipeline.edges for stage in edge}
    edited_by_stage = {}
    for stage, ran in read_dvc_locks().items():
        if stage not in present:
            continue  # of a method or a seed that the study no longer names
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
    for name, hashes in hash_code_files(load_yaml_document(str(params)), root).items():
        file = CODE / name
        before = read_json(file) if file.exists() else {}
        differing = {path for path in before | hashes if before.get(path) != hashes.get(path)}
        if differing:
            edits[file] = tuple(f"{path} edited" for path in sorted(differing))
    return edits


def _is_within(path: Path, file: Path) -> bool:
    return path == file or path in file.parents


def _stage_name(addressing: str) -> str:
    """A stage without the path of its dvc.yaml."""
    return addressing.split(":")[-1]


def _describe_changes(entries: Iterable[Any]) -> Iterator[str]:
    """DVC's entries in words.

    As ``{"changed deps": {"params.yaml": {"epochs": "modified"}}}`` or ``"always changed"``.
    """
    for entry in entries:
        for what, changes in (entry if isinstance(entry, dict) else {str(entry): None}).items():
            if not changes:
                yield what
            for path, change in (changes or {}).items():
                if isinstance(change, dict):
                    yield from (f"{key} {state}" for key, state in change.items())
                else:
                    yield f"{what.removeprefix('changed ').rstrip('s')} {path} {change}"


def sort_stages(stages: Collection[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return these stages and those of the edges, each after those that it depends on."""
    sorter = TopologicalSorter(dict.fromkeys(stages, ()))
    for before, after in edges:
        sorter.add(after, before)
    sorter.prepare()
    order: list[str] = []
    while ready := sorted(sorter.get_ready()):
        order += ready
        sorter.done(*ready)
    return order


def _estimate_seconds(stage: str, seconds: Mapping[str, float]) -> float | None:
    kind = stage.split("@")[0]
    siblings = [value for name, value in seconds.items() if name.split("@")[0] == kind]
    return seconds.get(stage, fmean(siblings) if siblings else None)


def past_seconds(folder: Path = Path("artifacts/history")) -> dict[str, float]:
    """Return seconds of the finished runs by DVC stage, or by the name that DVC would give them."""
    seconds = {}
    for file in sorted(folder.rglob(HISTORY_FILE)):
        lines = read_lines(file.parent)
        if lines and "uid" in lines[0] and lines[-1].get("status") == "FINISHED":
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
    pipeline = query_pipeline_status()
    planned = plan_stages(pipeline, past_seconds(), stages_changed_by_code(pipeline))
    heavy = [item for item in planned if item.stage != HASHING]
    if not heavy:
        print("Nothing would run: everything is up to date.")
        return
    width = max(len(item.stage) for item in heavy)
    for item in heavy:
        last = "?" if item.seconds is None else format_duration(item.seconds)
        more = f" (+{len(item.reasons) - SHOWN})" if len(item.reasons) > SHOWN else ""
        print(f"{item.stage:<{width}}  {last:>8}  {'; '.join(item.reasons[:SHOWN])}{more}")
    seconds = format_duration(sum(item.seconds or 0 for item in heavy))
    unknown = sum(item.seconds is None for item in heavy)
    rest = f" and {unknown} of unknown length" if unknown else ""
    print(f"{len(heavy)} stages, about {seconds}{rest}")
