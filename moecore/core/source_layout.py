"""Locations of source files, and of files in a project."""

import hashlib
import os
import subprocess
from pathlib import Path

from moecore.core.files import UserError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("moecore", "moecore/stages")  # in a clone, the second is a link to stages/
STAGE_MODULES = "moecore.stages."  # prefix of a stage's module
SHIPPED = ROOT / "moecore/pipeline/shipped"  # params.yaml, dvc.yaml, studies of this version
RUNS = ".runs"  # in a project: folders in which the questions of pipelines/ run
PROJECT_ANSWERS = ".moecore.json"  # in a project: the answers with which `moecore new` began it
CODE = Path("artifacts/code")  # hashes of source files, written by the stage `code`
FAMILIES = (  # folders of parts
    "nn/routers",
    "nn/experts",
    "nn/backbones",
    "data/sources",
    "attacks",
    "tasks",
    "training/regularizers",
    "training/teachers",
    "measure/calibrators",
)
PUBLIC_FAMILIES = (  # packages of moecore with a .pyi, which `python -m tools.stubs` writes
    *("routers", "experts", "balances", "backbones", "regularizers", "teachers"),
    *("sources", "attacks", "tasks", "measure", "calibrators"),
)


def list_project_dvc_files(folder: Path, name: str = "dvc.yaml") -> list[Path]:
    """Return the existing paths of a project's ``name``, also in ``steps/*/`` of a large study."""
    files = [folder / name, *sorted(folder.glob(f"steps/*/{name}"))]
    return [file for file in files if file.is_file()]


def project_of(folder: Path) -> Path:
    """Return the project of a run folder .runs/<name>; for any other folder, the folder itself."""
    resolved = folder.resolve()
    if resolved.parent.name == RUNS:
        return resolved.parents[1]
    return resolved


def question_folders(folder: Path) -> tuple[Path, ...]:
    """Return (pipelines/<folder>, project) of a run folder; () for any other folder."""
    resolved = folder.resolve()
    if resolved.parent.name != RUNS:
        return ()
    project = resolved.parents[1]
    return (project / "pipelines" / resolved.name.partition(".")[0], project)


def package_source_hash(root: Path = ROOT) -> str:
    """Return a hash of moecore's Python files below ``root``."""
    digest = hashlib.sha256()
    files = {file for name in SOURCES for file in (root / name).rglob("*.py")}
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def run_git(folder: Path, *arguments: str, timeout: float | None = None) -> str | None:
    """Return the output of a git command; None if it fails, or git is not installed."""
    # A git hook sets GIT_DIR and others, which would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options = {"cwd": folder, "env": env, "stderr": subprocess.DEVNULL, "timeout": timeout}
    try:
        return subprocess.check_output(["git", *arguments], text=True, **options).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def refuse_other_checkout(folder: Path = Path()) -> None:
    """Raise UserError if ``folder`` belongs to a checkout of moecore with other code than ours."""
    checkout = project_of(folder)
    if not (checkout / "moecore/core/source_layout.py").is_file() or checkout.samefile(ROOT):
        return
    if package_source_hash(checkout) != package_source_hash():
        other = f"{checkout}: has other code of moecore than {ROOT}, which would run here"
        raise UserError(f"{other}; activate this checkout's own environment (`make setup`)")
