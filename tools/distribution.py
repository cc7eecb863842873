"""Build what a release uploads: dist/moecore-VERSION.tar.gz, and the wheel built from it.

    python -m tools.distribution

Both are built of the last commit, in a temporary folder, so that no file of an earlier build or of
this clone alone gets into them. The wheel must have exactly git's modules.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml
from packaging.metadata import Metadata

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT

BUILD = "import sys, setuptools.build_meta as build; getattr(build, sys.argv[1])(sys.argv[2])"
NO_MODULES = ("moecore/pipeline/project_template/", "moecore/pipeline/shipped/")  # data


def build_distribution(out: Path, commit: str = "HEAD") -> tuple[Path, Path]:
    """Write the sdist and the wheel of a commit to ``out``; return both; UserError if wrong."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, unpacked = Path(scratch, "source"), Path(scratch, "unpacked")
        archive = Path(scratch, "source.tar")
        subprocess.run(["git", "archive", "-o", archive, commit], cwd=ROOT, check=True)
        _unpack(archive, source)
        sdist = _build(source, "build_sdist", out.resolve(), "moecore-*.tar.gz")
        _unpack(sdist, unpacked)
        wheel = _build(next(unpacked.iterdir()), "build_wheel", out.resolve(), "moecore-*.whl")
        _check_wheel(wheel, source)
    return sdist, wheel


def _unpack(archive: Path, folder: Path) -> None:
    # The archives are our own; Python before 3.11.4 has no filters.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **options)


def _build(source: Path, step: str, out: Path, pattern: str) -> Path:
    """Run one step of the build backend; return the file that it wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-c", BUILD, step, scratch]
        subprocess.run(words, cwd=source, check=True, capture_output=True)
        (built,) = Path(scratch).glob(pattern)
        target = out / built.name
        target.write_bytes(built.read_bytes())
    return target


def _check_wheel(wheel: Path, source: Path) -> None:
    """Raise UserError for invalid metadata, another version in CITATION.cff, or other modules."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (file,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(archive.read(file))
    citation = yaml.safe_load((source / "CITATION.cff").read_text(encoding="utf-8"))
    if str(metadata.version) != citation["version"]:
        allowed = f"{metadata.version}, as in pyproject.toml"
        raise UserError.at("CITATION.cff: version", found=citation["version"], allowed=allowed)
    paths = {path.relative_to(source).as_posix() for path in source.glob("moecore/**/*.py")}
    linked = {"stages": source / "stages", "conformance": source / "conformance/suite"}
    for room, home in linked.items():
        paths |= {f"moecore/{room}/{file.name}" for file in home.glob("*.py")}
    modules = {name for name in names if name.endswith(".py")}
    other = sorted(name for name in modules ^ paths if not name.startswith(NO_MODULES))
    if other:
        found = f"modules that only git or only it has: {', '.join(other[:5])}"
        raise UserError.at(wheel.name, found=found, allowed="the modules of the commit")


if __name__ == "__main__":
    for path in build_distribution(ROOT / "dist"):
        print(path)
