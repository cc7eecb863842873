"""``moecore pull``: downloads a finished run from an archive of a release."""

import os
import re
import shutil
import tarfile
from contextlib import chdir
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from urllib.request import urlretrieve

import typer
from typer import Argument, Option

from moecore.core.files import UserError, atomic_folder, file_checksum, write_atomic
from moecore.core.source_layout import run_git

RELEASES_ENV = "MOECORE_RELEASES"  # the variable that names the place of the archives
REMOTE = "remote"  # the folder of DVC's objects in an archive
MODEL_CARDS = "artifacts/model_cards"
ALLOWED_SOURCES = f"--from with a URL, an archive or its folder, or the same in ${RELEASES_ENV}"
SOURCE_HELP = "an archive, or the URL or folder that has it; left out: the releases of git's origin"


def pull_command(
    name: Annotated[str | None, Argument(help="quick, or a question; left out: this run")] = None,
    source: Annotated[str | None, Option("--from", metavar="PLACE", help=SOURCE_HELP)] = None,
    force: Annotated[bool, Option("--force", help="replace the outputs of another run")] = False,
) -> None:
    """Download a finished run (models, page, explorer) from a release, to look at or go on from."""
    from moecore.pipeline.plan import list_stale_stages
    from moecore.pipeline.project_record import hold_project_lock
    from moecore.pipeline.run_folders import write_run_folder
    from moecore.report.tables.terminal_summary import print_run_summary
    from moecore.study.questions import find_question
    from moecore.study.yaml_document import load_yaml_document

    url = find_archive_address(source)
    folder = Path()
    if name is not None:
        question_round = find_question(folder, name).round(None)
        write_run_folder(question_round)
        folder = question_round.folder
    with chdir(folder):
        load_yaml_document("params.yaml")  # fails before anything is written, outside a project
        with hold_project_lock(), atomic_folder(".state/pull") as scratch:
            pull_outputs(unpack_and_check_run(fetch_archive(url, scratch)), force)
        shutil.rmtree(".state/pull")
        number = len(list_stale_stages())
    print_run_summary(folder / "reports/compare.json")
    typer.echo(f"pulled; stages that would run: {number} (`moecore plan`)")


def archive_name(folder: Path) -> str:
    """Return the file name of a run's archive: moecore-run-NAME-VERSION.tar."""
    home = folder.resolve()
    name = home.name if home.parent.name == ".runs" else "default"
    return f"moecore-run-{name}-{version('moecore')}.tar"


def find_archive_address(source: str | None) -> str:
    """Return the URL of archives: --from, else $MOECORE_RELEASES, else of git's origin."""
    if place := source or os.environ.get(RELEASES_ENV):
        return place if "://" in place else Path(place).expanduser().resolve().as_uri()
    origin = run_git(Path(), "config", "--get", "remote.origin.url") or ""
    if repository := re.search(r"github\.com[:/](.+?)(?:\.git)?/?$", origin):
        return f"https://github.com/{repository[1]}/releases/download/v{version('moecore')}"
    raise UserError.at("pull", found="no remote", allowed=ALLOWED_SOURCES)


def fetch_archive(url: str, scratch: Path) -> Path:
    """Download an archive, verify its sha256 by the file URL.sha256, and return its path."""
    if not url.endswith(".tar"):
        url = f"{url.rstrip('/')}/{archive_name(Path())}"
    archive = scratch / "run.tar"
    checksum = scratch / "run.tar.sha256"
    try:
        urlretrieve(f"{url}.sha256", checksum)
        urlretrieve(url, archive)
    except (OSError, HTTPException, ValueError) as error:
        raise UserError.at(url, found=str(error).strip("<>"), allowed=ALLOWED_SOURCES) from None
    expected = checksum.read_text(encoding="utf-8", errors="replace").partition(" ")[0]
    if (digest := file_checksum(archive)) != expected:
        raise UserError.at(url, found=f"a damaged file, sha256 {digest}", allowed=expected)
    return archive


def unpack_and_check_run(archive: Path) -> Path:
    """Unpack an archive and return its folder; UserError if its settings are not params.yaml's."""
    from moecore.study.params_writer import list_changes
    from moecore.study.yaml_document import load_yaml_document

    run = archive.with_name("run")
    try:
        with tarfile.open(archive) as tar:
            _extract_files(tar, run)
    except tarfile.TarError as error:
        raise UserError.at("pull", found=error, allowed="an archive of a run") from None
    ours = load_yaml_document("params.yaml").data
    if change := next(list_changes(ours, load_yaml_document(str(run / "params.yaml")).data), None):
        problem = f"an archive of other settings, {change} in it"
        raise UserError.at("params.yaml", found=problem, allowed="the settings of the archive")
    return run


def _extract_files(tar: tarfile.TarFile, folder: Path) -> None:
    # Python before 3.11.4, such as Debian 12's, has no filters of ``extractall``.
    for member in tar:
        target = folder / member.name
        is_inside = ".." not in target.parts and target.is_relative_to(folder)
        if not is_inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name}, a link or a place outside of the archive")
        if content := tar.extractfile(member):  # None for a folder
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file)


def pull_outputs(run: Path, is_forced: bool) -> None:
    """Copy an unpacked run's outputs (by DVC), reports and model cards into this project."""
    # Raises UserError, and changes nothing, if another run's dvc.lock or outputs that are in no
    # cache would be lost; is_forced: replace them.
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    locks = [path.relative_to(run) for path in (run / "dvc.lock", *run.glob("steps/*/dvc.lock"))]
    texts = {lock: lock.read_bytes() if lock.is_file() else b"" for lock in locks}
    for lock, text in texts.items():
        if text not in (b"", (run / lock).read_bytes()) and not is_forced:
            raise UserError.at(lock, found="another run", allowed="--force, to replace its outputs")
    try:
        for lock in locks:
            write_atomic(lock, (run / lock).read_bytes())
        with Repo(config={"remote": {"release": {"url": str((run / REMOTE).resolve())}}}) as repo:
            repo.pull(remote="release", force=is_forced)
    except DvcException as error:
        for lock, text in texts.items():
            if text:
                write_atomic(lock, text)
            else:
                lock.unlink()
        raise UserError(f"dvc: {' '.join(str(error).split())}") from None
    for path in [*run.glob("reports/*"), *run.glob(f"{MODEL_CARDS}/*.md")]:
        write_atomic(path.relative_to(run), path.read_bytes())
