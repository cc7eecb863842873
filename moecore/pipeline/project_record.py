"""A project's file .moecore.json, and the lock that only one running pipeline can hold."""

import hashlib
import json
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import distribution, version
from pathlib import Path

from moecore.core import config, source_layout
from moecore.core.files import UserError, write_json
from moecore.run import run_record, stage_entry

LOCK = Path(".state/driver.lock")  # held by the process that runs the stages
LOCK_HOLDER_FILE = "driver.json"  # in the same folder: the process, and its start


class ProjectAnswers(config.Config):
    """The content of .moecore.json: version, name, question, and hashes of written files."""

    moecore: str  # the version that wrote them
    name: str
    study: str
    files: dict[str, str]  # path → sha256 of the written text


def write_answers(folder: Path, name: str, study: str, texts: Mapping[str, str]) -> None:
    files = {path: hash_text(text) for path, text in texts.items()}
    answers = ProjectAnswers(moecore=version("moecore"), name=name, study=study, files=files)
    write_json(folder / source_layout.PROJECT_ANSWERS_FILE, answers.model_dump())


def read_answers(folder: Path) -> ProjectAnswers:
    """Return a project's .moecore.json; UserError if it is missing or newer than moecore."""
    path = folder / source_layout.PROJECT_ANSWERS_FILE
    if not path.is_file():
        raise UserError(f"{path}: found no such file; start from a folder of `moecore new`")
    try:
        answers = config.read_json_settings(path, ProjectAnswers, "answers")
    except UserError as error:
        problem = str(error).removeprefix(f"{path}: ").partition(";")[0]
        raise UserError(f"{path}: {problem}; restore it: git checkout {path}") from error
    installed = version("moecore")
    if version_numbers(answers.moecore) > version_numbers(installed):
        newer = f"the project is of moecore {answers.moecore}, newer than the installed {installed}"
        raise UserError(f"{path}: {newer}; install moecore{version_range(answers.moecore)}")
    return answers


def version_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def version_range(text: str) -> str:
    """Return the version range that suits a project of version ``text``: ``>=0.2.0,<0.3``."""
    major, minor, *_ = version_numbers(text)
    return f">={text},<{major}.{minor + 1}"


def moecore_requirement() -> str:
    """Return the requirement of this moecore for pip: ``moecore @ URL`` or ``moecore>=…``."""
    # By name alone, pip would install any package that an index has under it.
    recorded = distribution("moecore").read_text("direct_url.json")  # PEP 610
    if recorded is None:
        return f"moecore{version_range(version('moecore'))}"
    origin = json.loads(recorded)
    url = origin["url"]
    if "vcs_info" in origin:
        url = url.replace("file:///", "file://localhost/", 1)  # pip before 24.1 needs a host here
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    checks = list(origin.get("archive_info", {}).get("hashes", {}).items())
    if "subdirectory" in origin:
        checks.append(("subdirectory", origin["subdirectory"]))
    fragment = "&".join(f"{name}={value}" for name, value in checks)
    return f"moecore @ {url}#{fragment}" if fragment else f"moecore @ {url}"


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@contextmanager
def hold_project_lock(path: Path = LOCK) -> Iterator[None]:
    """Hold the project's lock within the block; UserError names the process that has it."""
    holder = path.with_name(LOCK_HOLDER_FILE)

    def describe_driver() -> str:
        who = "another process is running the stages of this folder"
        mend = "wait for it, or end it and start again"
        with suppress(OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
            driver = json.loads(holder.read_text(encoding="utf-8"))
            began = f"has been running the stages of this folder since {driver['since']}"
            who = f"process {driver['pid']} {began}"
            mend += f" (`kill {driver['pid']}`)"
        return f"{path.parent}: {who}; {mend}"

    with run_record.hold_lock(path, describe_driver):
        write_json(holder, {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        yield


def dvc_command(*arguments: str) -> list[str]:
    """Return the command line that runs DVC as a process that ends with its parent."""
    return [sys.executable, "-m", "moecore.pipeline.project_record", *arguments]


if __name__ == "__main__":
    stage_entry.end_with_parent()
    runpy.run_module("dvc", run_name="__main__", alter_sys=True)
