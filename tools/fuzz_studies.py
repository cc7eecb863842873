"""Draw random studies, check them, and run every stage of those that the check accepts.

``python -m tools.fuzz_studies --first 0 --accepted 100`` draws the studies of the seeds 0, 1, …
until so many in a row have finished; each is a function of its seed. A study that fails after it
was accepted, or whose check ends in a traceback, stays in ``--out`` with its params.yaml and what
it printed.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import yaml

from moecore.core.config import KIND
from moecore.core.files import UserError
from moecore.pipeline.code_hashes import compute_code_hashes
from moecore.pipeline.dvc_yaml import build_stage_entries, study_dvc_yaml_texts
from moecore.report.tables.metrics_by_method import expected_metrics, unanswerable_claims
from moecore.run.stage_entry import run_stage
from moecore.stages.fork_server import STAGES
from moecore.study.check import check_study
from moecore.study.params_layers import list_dvc_stages
from moecore.study.stages import LAST_STAGES, STAGE_SECTIONS
from moecore.study.study import Study
from moecore.study.yaml_document import load_yaml_document
from tools.draw_study import StudyDrawer, write_raw_data

ALWAYS = ("prepare", *LAST_STAGES)
REPAIRS = 16  # rounds in which the settings that the check names are left out
LINE = re.compile(r"params\.yaml:\d+:\d+: ([^ ]+): .*?(?:\((prune|merge)\))?$", re.MULTILINE)


def is_accepted(data: dict[str, Any], seed: int, folder: Path) -> bool:
    """Write the study without refused settings to ``folder``; return whether it is accepted."""
    study = repair_until_accepted(data, folder)
    if study is None:
        return False
    data["questions"] = draw_questions(seed, study, list_dvc_stages(folder))
    return repair_until_accepted(data, folder) is not None


def repair_until_accepted(data: dict[str, Any], folder: Path) -> Study | None:
    """Remove refused settings from ``data`` until the check accepts it; None if it never does."""
    for _ in range(REPAIRS):
        write_study_files(data, folder)
        try:
            with chdir(folder):
                return check_study("params.yaml", also=unanswerable_claims).study
        except UserError as error:
            lines = [(re.findall(r"\w+", line[1]), line[2]) for line in LINE.finditer(str(error))]
        named = {
            tuple(words[:2]): [reduction] if reduction else words for words, reduction in lines
        }
        for words in sorted(
            named.values(), reverse=True
        ):  # a list's last item first, so that indices stay valid
            drop_setting(data, [int(word) if word.isdigit() else word for word in words])
        leave_out_rest(data)
        if not {"model", "methods", "pretrain"} <= set(data) or not data["methods"]:
            return None
    return None


def drop_setting(data: dict[str, Any], keys: Sequence[Any]) -> None:
    """Remove the setting at ``keys``, a part's settings except its kind, or the whole method."""
    if keys[:2] == ["run", "phases"]:
        keys = ["data", data["run"]["phases"][keys[2]]]
    if keys[0] == "run":
        data["run"]["measurements"] = []
        return
    if keys[:2] in (["data", "pretrain"], ["model", "kind"]):
        keys = ["model"]
    if keys[0] not in data:
        return  # another line has named it
    if keys[:2] == ["teacher", "model"]:
        data["teacher"]["model"] = data.get("model")
        return
    holder, last = data, keys[0]
    for key in keys[1:]:
        if not isinstance(holder[last], dict | list) or key not in _list_keys(holder[last]):
            break
        holder, last = holder[last], key
    part = holder[last] if last == keys[-1] and isinstance(holder, dict) else None
    if keys[0] in ("data", "questions"):
        del data[keys[0]][keys[1]]
    elif isinstance(part, dict) and len(part) > 1 and KIND in part:
        holder[last] = {KIND: part[KIND]}
    elif keys[0] == "methods" and (last != keys[-1] or last == KIND):
        del data["methods"][keys[1]]
    elif last == keys[-1]:
        del holder[last]
    else:
        del data[keys[0]]


def leave_out_rest(data: dict[str, Any]) -> None:
    """Remove names from ``run``, and sections, that depend on removed settings."""
    run = data["run"]
    phases = [name for name in run["phases"] if name in data and name in data["data"]]
    for name in run["phases"]:
        if name not in phases:
            data.pop(name, None)
            data["data"].pop(name, None)
    run["methods"] = list(data["methods"])
    run["phases"] = run["thorough"] = phases
    run["measurements"] = [name for name in run["measurements"] if name in data]
    if "calibrate" not in data:
        data.pop("out_of_fold", None)


def _list_keys(value: Any) -> Sequence[Any]:
    return range(len(value)) if isinstance(value, list) else list(value)


def write_study_files(data: dict[str, Any], folder: Path) -> None:
    """Write params.yaml and a dvc.yaml of the stages whose sections the study has."""
    stages = [
        name for name in STAGE_SECTIONS if name in data or name in ALWAYS or name == "measure"
    ]
    definitions = build_stage_entries(stages)
    for name, text in study_dvc_yaml_texts(definitions, data["run"]).items():
        (folder / name).write_text(text, encoding="utf-8")
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    (folder / "params.yaml").write_text(text, encoding="utf-8")


def draw_questions(seed: int, study: Study, stages: Sequence[str]) -> list[dict[str, str]]:
    """Draw questions about at most two expected metrics per phase."""
    draw = random.Random(seed)
    questions = []
    for phase in study.run.phases if len(study.run.methods) > 1 else ():
        metrics = list(expected_metrics(study, stages, phase))
        for metric in draw.sample(metrics, min(2, len(metrics))):
            methods = draw.sample(study.run.methods, 2)
            asked = {"metric": metric, "method": methods[0], "against": methods[-1]}
            questions.append(asked | {"better": "higher", "phase": phase, "asks": "so?"})
    return questions


def list_stage_commands(folder: Path) -> Iterator[list[str]]:
    """Yield the words of each stage that DVC would start: its module's name, then its item."""
    data = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    stages = yaml.safe_load((folder / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    for name, stage in stages.items():
        stage = stage.get("do", stage)
        if "moecore.stages." not in stage["cmd"]:
            continue
        lists = {key: data["run"][text[6:-1]] for key, text in stage.get("matrix", {}).items()}
        lists |= {"key": list(data["data"])} if name == "prepare" else {}
        for values in itertools.product(*lists.values()):
            command = stage["cmd"].partition("moecore.stages.")[2]
            for key, value in zip(lists, values, strict=True):
                command = re.sub(rf"\$\{{(item\.)?{key}\}}", str(value), command)
            yield command.split()


def run_all_stages(folder: Path) -> None:
    """Run every stage of a study in this process; output goes to the file ``printed``."""
    os.chdir(folder)
    with open("printed", "w", encoding="utf-8") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        for name, *words in list_stage_commands(Path()):
            print("==", name, *words, flush=True)
            run_stage(STAGES[name], words)


def try_study(seed: int, folder: Path, raw: Path, limit: float) -> str:
    """Return what became of a study: ``refused``, ``finished``, or ``FAILED`` and where.

    limit: seconds after which its stages are killed.
    """
    data = StudyDrawer(seed, raw).draw_study()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not is_accepted(data, seed, folder):
            return "refused"
    except Exception:
        (folder / "printed").write_text(traceback.format_exc(), encoding="utf-8")
        return "FAILED check"
    compute_code_hashes(load_yaml_document(folder / "params.yaml"))  # read once, for all forks
    process = multiprocessing.get_context("fork").Process(target=run_all_stages, args=(folder,))
    process.start()
    process.join(limit)
    too_long = ""
    if process.is_alive():
        process.kill()
        process.join()
        too_long = f", killed after {limit:g} s"
    if process.exitcode == 0:
        return "finished"
    commands = re.findall(
        "^== (.*)", (folder / "printed").read_text(encoding="utf-8"), re.MULTILINE
    )
    return f"FAILED {commands[-1]}{too_long}"


def main() -> None:
    """Print one line per study; exit with 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first study")
    parser.add_argument("--accepted", type=int, default=100, help="studies in a row that finish")
    parser.add_argument("--studies", type=int, default=10**6, help="seeds that are tried at most")
    parser.add_argument("--out", type=Path, default=Path("fuzzed"), help="where failures stay")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a study may take")
    asked = parser.parse_args()
    os.environ |= {"MOECORE_THREADS": "1", "MOECORE_DEVICE": "cpu"}
    torch.optim.SGD([torch.zeros(1)])  # the first of a process imports torch's compiler
    out = asked.out.resolve()
    raw, row, failures = write_raw_data(out / "raw"), 0, 0
    for seed in range(asked.first, asked.first + asked.studies):
        began = time.monotonic()
        outcome = try_study(seed, out / str(seed), raw, asked.limit)
        print(f"{seed} {outcome} {time.monotonic() - began:.1f} s", flush=True)
        row = row + (outcome == "finished")
        if outcome.startswith("FAILED"):
            row, failures = 0, failures + 1
        else:
            shutil.rmtree(out / str(seed))
        if row == asked.accepted:
            break
    print(f"{failures} failed; the last {row} that were accepted have finished")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
