"""Where the source files lie."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = Path("artifacts/code")  # their hashes, which the stage `code` writes
FAMILIES = (  # folders of parts; the `__init__` of each holds nothing but their union
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


def list_dvc_files(folder: Path, name: str = "dvc.yaml") -> list[Path]:
    """Return a project's files of this name: its own, those of a large study's kinds of stages."""
    files = [folder / name, *sorted(folder.glob(f"steps/*/{name}"))]
    return [file for file in files if file.is_file()]


def package_source_hash() -> str:
    """A hash of the files that this process imports from."""
    digest = hashlib.sha256()
    for folder in ("moecore", "stages"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
