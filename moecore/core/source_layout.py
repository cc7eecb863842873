"""Where the source files lie."""

import hashlib
from pathlib import Path

from moecore.core.files import UserError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("moecore", "moecore/stages")  # the second is a link where stages/ lies apart
STAGE_MODULES = "moecore.stages."  # before the name of a stage
SHIPPED = ROOT / "moecore/pipeline/shipped"  # params.yaml, dvc.yaml, studies of this version
PAPERS = ROOT / "moecore/report/papers"  # links to pipelines/<paper>/paper.yaml
RUNS = ".runs"  # of a project: folders in which the questions of pipelines/ are run
PROJECT_ANSWERS = ".moecore.json"  # of a project: with what `moecore new` began it
CODE = Path("artifacts/code")  # their hashes, which the stage `code` writes
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


def list_project_dvc_files(folder: Path, name: str = "dvc.yaml") -> list[Path]:
    """Return a project's files of this name: its own, those of a large study's kinds of stages."""
    files = [folder / name, *sorted(folder.glob(f"steps/*/{name}"))]
    return [file for file in files if file.is_file()]


def project_of(folder: Path) -> Path:
    """Return the project that runs a question in ``folder``; the folder itself where none does."""
    here = folder.resolve()
    return here.parents[1] if here.parent.name == RUNS else here


def question_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folder of the question that runs in ``folder``, if any: its packages lie there."""
    here = folder.resolve()
    if here.parent.name != RUNS:
        return ()
    return (here.parents[1] / "pipelines" / here.name.partition(".")[0],)


def package_source_hash(root: Path = ROOT) -> str:
    """Return a hash of the package's files below ``root``: there this process imports from."""
    digest = hashlib.sha256()
    files = {file for name in SOURCES for file in (root / name).rglob("*.py")}
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def refuse_other_checkout(folder: Path = Path()) -> None:
    """Raise UserError where ``folder`` is a checkout of moecore, or runs a question of one, whose
    code is not the code that this process runs.
    """
    checkout = project_of(folder)
    if not (checkout / "moecore/core/source_layout.py").is_file() or checkout.samefile(ROOT):
        return
    if package_source_hash(checkout) != package_source_hash():
        other = f"{checkout}: has other code of moecore than {ROOT}, which would run here"
        raise UserError(f"{other}; activate this checkout's own environment (`make setup`)")
