"""``moecore plan``: which stages would run, why and for how long; changes of raw data."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from moecore.core.files import UserError, explain_file_errors, read_json
from moecore.core.source_layout import HASHES_DIR, ROOT
from moecore.data.raw_data_changes import describe_folder_change
from moecore.pipeline.code_hashes import compute_code_hashes, digest_code_inputs, is_code_up_to_date
from moecore.run import history_file, run_record, stage_entry
from moecore.study.stages import CODE_STAGE
from moecore.study.yaml_document import dict_or_empty, load_yaml_document

ALWAYS_CHANGED_STATUS = "always changed"  # DVC's status of such a stage
RUNNING_STATUS = "runs now"
MISSING_INPUT = re.compile("dep .* deleted")  # of a stage's reasons
COPYING_STAGE = "numbers"  # a stage that only copies files
SHOWN = 2  # printed reasons, and stages above
PREPARE_HISTORY_FOLDER = Path("artifacts/history/prepare")  # records the raw folders
RAW_FOLDERS_TABLE = Path("tables/raw.json")
Reasons = tuple[str, ...]  # why a stage would run


class PlannedStage(NamedTuple):
    """A stage that would run, with reasons and expected seconds (None: unknown)."""

    # An uncertain stage runs only if the output of an earlier stage changes.

    stage: str
    reasons: Reasons
    seconds: float | None
    is_certain: bool = True


class StatusAndDag(NamedTuple):
    status: Mapping[str, list]  # changed stage → entries of ``dvc status --json``
    edges: list[tuple[str, str]]  # (before, after)


def query_pipeline_status(is_locked: bool = True) -> StatusAndDag:
    # is_locked: take DVC's locks. Without them the status, which names running stages, can be
    # read while stages run, and no stage waits for the reader.
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with explain_file_errors(Path(".dvc")), Repo() as repo:
            status = repo.status() if is_locked else _status_without_locks(repo)
            edges = [
                (_strip_dvc_file(before.addressing), _strip_dvc_file(after.addressing))
                for after, before in repo.index.graph.edges
            ]
    except DvcException as error:
        history_file.read_dvc_locks()
        raise UserError(f"dvc: {error}") from None
    return StatusAndDag(status, edges)


def _status_without_locks(repo: Any) -> dict[str, list]:
    lock_file = Path(repo.tmp_dir, "rwlock")
    locks = lock_file.read_text(encoding="utf-8") if lock_file.is_file() else ""
    written = set(json.loads(locks or "{}").get("write", ()))
    status = {}
    for stage in repo.index.stages:
        if written.isdisjoint(out.fs_path for out in stage.outs):
            status |= type(stage).status.__wrapped__(stage, check_updates=True)
        else:
            status[stage.addressing] = [RUNNING_STATUS]
    return status


def plan_stages(
    pipeline: StatusAndDag,
    seconds: Mapping[str, float],  # stage → seconds of past runs
    by_code: Mapping[str, Reasons] | None = None,  # stage → reasons, of changed code
) -> list[PlannedStage]:
    """Return the stages that would run, in a valid order, with reasons and durations."""
    # If ``by_code`` is given, the stage ``code`` causes no other runs. What DVC's run cache
    # restores is not known beforehand.
    by_kind: dict[str, list[float]] = {}
    for stage, value in seconds.items():
        by_kind.setdefault(_stage_kind_by_duration(stage), []).append(value)
    medians = {kind: median(values) for kind, values in by_kind.items()}
    reasons: dict[str, Reasons] = {}
    for stage, entries in pipeline.status.items():
        if texts := tuple(dict.fromkeys(_describe_changes(entries))):
            reasons[_strip_dvc_file(stage)] = texts
    for stage, texts in (by_code or {}).items():
        reasons[stage] = (*reasons.get(stage, ()), *texts)
    sorter = TopologicalSorter(dict.fromkeys(reasons, ()))
    for before, after in pipeline.edges:
        sorter.add(after, before)
    sorter.prepare()
    order: list[str] = []
    while batch := sorted(sorter.get_ready()):
        order += batch
        sorter.done(*batch)
    planned = []
    for stage in order:
        above = [before for before, after in pipeline.edges if after == stage if before in reasons]
        if by_code is not None:
            above = [before for before in above if before != CODE_STAGE]
        # a stage above may make a missing input again as it was
        texts = reasons.get(stage, ())
        is_certain = not all(above and MISSING_INPUT.fullmatch(text) for text in texts)
        if stage not in reasons and above:
            more = f" and {len(above) - SHOWN} more" if len(above) > SHOWN else ""
            reasons[stage] = (f"after {', '.join(above[:SHOWN])}{more}",)
        if stage in reasons:
            estimate = seconds.get(stage, medians.get(_stage_kind_by_duration(stage)))
            planned.append(PlannedStage(stage, reasons[stage], estimate, is_certain))
    return planned


def stages_changed_by_code(pipeline: StatusAndDag, root: Path = ROOT) -> dict[str, Reasons] | None:
    """Return stage → edited files it uses; None if stage ``code`` has other reasons to rerun."""
    # DVC only knows that the stage ``code`` has to run. The code is hashed here as by that stage,
    # and compared with the stage's last result. None: all stages below ``code`` may run.
    entries = pipeline.status.get(CODE_STAGE, [])
    if any(entry != ALWAYS_CHANGED_STATUS and set(entry) != {"changed deps"} for entry in entries):
        return None
    document = load_yaml_document(os.environ.get("MOECORE_PARAMS", "params.yaml"))
    is_edited = entries and not is_code_up_to_date(digest_code_inputs(document, root), document)
    hashed = compute_code_hashes(document, root) if is_edited else {}
    edits: dict[Path, list[str]] = {}  # hash file → source files that differ
    for name, hashes in hashed.items():
        file = HASHES_DIR / name
        before = read_json(file) if file.exists() else {}
        differing = {path for path in before | hashes if before.get(path) != hashes.get(path)}
        edits[file] = [f"{path} edited" for path in sorted(differing)]
    present = {stage for edge in pipeline.edges for stage in edge}
    edited_by_stage = {}
    for stage, ran in history_file.read_dvc_locks().items():
        if stage not in present:
            continue  # of a method or a seed that the study no longer names
        paths = {Path(dep["path"]) for dep in ran.get("deps", ())}
        files = [file for file in edits if paths & {file, *file.parents}]
        if names := tuple(dict.fromkeys(name for file in files for name in edits[file])):
            edited_by_stage[stage] = names
    return edited_by_stage


def _strip_dvc_file(addressing: str) -> str:
    return addressing.split(":")[-1]


def _stage_kind_by_duration(stage: str) -> str:
    """Return a stage's kind, such as ``measure@cost``; stages of a kind take similar time."""
    return stage.split("-")[0] if stage.startswith("measure@") else stage.split("@")[0]


def _describe_changes(entries: Iterable[Any]) -> Iterator[str]:
    """Yield texts of DVC's status entries: ``seed modified``, ``dep artifacts/data modified``."""
    for entry in entries:
        for what, changes in (entry if isinstance(entry, dict) else {str(entry): None}).items():
            if not changes:
                yield what
            for path, change in (changes or {}).items():
                if isinstance(change, dict):
                    yield from (f"{key} {state}" for key, state in change.items())
                else:
                    yield f"{what.removeprefix('changed ').rstrip('s')} {path} {change}"


def read_past_durations() -> dict[str, float]:
    """Return stage → seconds of its last finished run."""
    seconds = {COPYING_STAGE: 0.0}
    for file in stage_entry.SECONDS_DIR.glob("*"):
        seconds[file.name] = float(file.read_text(encoding="utf-8"))
    for file in sorted(Path("artifacts/history").rglob(history_file.HISTORY_FILE)):
        lines = history_file.read_lines(file.parent) or [{}]
        stage = lines[0].get("dvc_stage")
        if stage and lines[-1].get("status") == "FINISHED":
            # unlike the last process, the history of a resumed run has all seconds
            seconds[_strip_dvc_file(stage)] = lines[-1]["seconds"]
    return seconds


def list_stale_stages() -> list[PlannedStage]:
    pipeline = query_pipeline_status(is_locked=False)
    planned = plan_stages(pipeline, read_past_durations(), stages_changed_by_code(pipeline))
    return [item for item in planned if item.stage != CODE_STAGE]


def print_plan() -> None:
    heavy = list_stale_stages()
    if not heavy:
        print("Nothing would run: everything is up to date.")
        return
    width = max(len(item.stage) for item in heavy)
    certain = [item for item in heavy if item.is_certain]
    possible = [item for item in heavy if not item.is_certain]
    for title, items in (("certain", certain), ("only if an output above changes", possible)):
        if items:
            print(f"{title}:")
        for item in items:
            last = "?" if item.seconds is None else run_record.format_duration(item.seconds)
            more = f" (+{len(item.reasons) - SHOWN})" if len(item.reasons) > SHOWN else ""
            print(f"  {item.stage:<{width}}  {last:>8}  {'; '.join(item.reasons[:SHOWN])}{more}")
    rest = f"; up to {format_total_duration(heavy)} if outputs change" if possible else ""
    print(f"certain: {format_total_duration(certain)}{rest}")


def format_total_duration(items: Sequence[PlannedStage]) -> str:
    """Return the stages' total duration as text: ``1 h 30 min (12 stages)``."""
    seconds = round(sum(item.seconds or 0 for item in items))
    hours, minutes = divmod(round(seconds / 60), 60)
    length = f"{seconds} s"
    if seconds >= 60:
        length = f"{hours} h {minutes} min".removeprefix("0 h ").removesuffix(" 0 min")
    unknown = sum(item.seconds is None for item in items)
    rest = f", {unknown} of unknown length" if unknown else ""
    stages = "1 stage" if len(items) == 1 else f"{len(items)} stages"
    return f"{length} ({stages}{rest})"


def describe_changed_raw_data(params: Path) -> Iterator[str]:
    sections = load_yaml_document(str(params)).data.get("data")
    with chdir(params.parent):
        for name in dict_or_empty(sections):
            record = PREPARE_HISTORY_FOLDER / name / RAW_FOLDERS_TABLE
            for before in read_json(record) if record.is_file() else []:
                if change := describe_folder_change(before):
                    mend = f"to prepare it again: `dvc repro -f -s prepare@{name}`"
                    yield f"{params.name}: data.{name}: {change}; {mend}, then `moecore run`"
