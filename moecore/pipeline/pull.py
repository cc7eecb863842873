"""``moecore pull``: a finished run from a release's archive, so that no stage has to run.

`python -m tools.release` writes the archive: a DVC remote, dvc.lock, params.yaml and reports.
"""

import hashlib
import http.client
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from moecore.core.files import UserError, explain_file_errors, whole_file, write_whole

RELEASES = "MOECORE_RELEASES"  # the environment variable that names the place of the archives
SCRATCH = Path(".state/pull")  # of one pull; one that was killed leaves it, and the next removes it
REMOTE = "remote"  # the folder of DVC's objects in an archive
MODEL_CARDS = "artifacts/model_cards"
CHECKSUM = ".sha256"
ALLOWED = f"--from with a URL, an archive or its folder, or the same in ${RELEASES}"
SOURCE = "an archive, or the URL or folder that has it; left out: the releases of git's origin"


def pull_command(
    name: Annotated[str | None, Argument(help="quick, or a question; left out: this run")] = None,
    source: Annotated[str | None, Option("--from", metavar="PLACE", help=SOURCE)] = None,
    force: Annotated[bool, Option("--force", help="replace the outputs of another run")] = False,
) -> None:
    """Download a finished run (models, page, explorer) from a release, to look at or go on from."""
    from moecore.pipeline.project import hold_project
    from moecore.report.tables.terminal_summary import print_end
    from moecore.study.document import load_yaml_document

    place = find_releases(source)
    folder = Path() if name is None else write_folder_of_run(name)
    with chdir(folder):
        load_yaml_document("params.yaml")  # fails before anything is written, outside a project
        with hold_project(), explain_file_errors(), _scratch_folder():
            unpacked = unpack_run(fetch_archive(place, archive_name(Path())))
            pull_outputs(unpacked, force)
            typer.echo(count_stale_stages())
    print_end(folder / "reports/compare.json")


def archive_name(folder: Path) -> str:
    """Return the file name of a run's archive, with ``default`` or the run's name below .runs/."""
    from moecore.pipeline.project_files import QUICK_LOOK

    home = folder.resolve()
    name = home.name if home.parent.name == ".runs" else "default"
    if home.name == QUICK_LOOK:
        name = "ours.quick"
    return f"moecore-run-{name}-{version('moecore')}.tar"


def find_releases(source: str | None) -> str:
    """Return --from, else $MOECORE_RELEASES, else the releases of git's origin; else UserError."""
    from moecore.report.claims.result_evidence import run_git

    if place := source or os.environ.get(RELEASES):
        return place if "://" in place else str(Path(place).expanduser().resolve())
    origin = run_git(Path(), "config", "--get", "remote.origin.url")
    if found := re.search(r"github\.com[:/](.+?)(?:\.git)?/?$", origin):
        return f"https://github.com/{found[1]}/releases/download/v{version('moecore')}"
    raise UserError.at("pull", found="no remote", allowed=ALLOWED)


def write_folder_of_run(name: str) -> Path:
    """Write the folder of a question's last round, or of `moecore quick`, and return it."""
    from moecore.pipeline.project_files import write_quick_look
    from moecore.pipeline.study_runs import write_run_folder
    from moecore.study.questions import find_question, list_question_names

    if name == "quick" and not list_question_names(Path()):
        return write_quick_look(Path())
    question_round = find_question(Path(), name).round(None)
    write_run_folder(question_round)
    return question_round.folder


@contextmanager
def _scratch_folder() -> Iterator[None]:
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)


def fetch_archive(place: str, name: str) -> Path:
    """Return an archive of this machine with the sha256 that the file beside it says."""
    if not place.endswith(".tar"):
        place = f"{place.rstrip('/')}/{name}"
    archive = Path(place)
    if "://" in place:
        archive = SCRATCH / name
        for suffix in (CHECKSUM, ""):
            _download(place + suffix, archive.with_name(name + suffix))
    checksum = archive.with_name(archive.name + CHECKSUM)
    for path in (archive, checksum):
        if not path.is_file():
            raise UserError.at(path, found="no such file", allowed=ALLOWED)
    expected = checksum.read_text(encoding="utf-8", errors="replace").partition(" ")[0].strip()
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        problem = f"a damaged archive, sha256 {found}"
        raise UserError.at(place, found=problem, allowed=f"{expected}, as {checksum.name} says")
    return archive


def _download(url: str, target: Path) -> None:
    try:
        with urllib.request.urlopen(url) as answer, whole_file(target) as temporary:
            with temporary.open("wb") as file:
                shutil.copyfileobj(answer, file)
    except (urllib.error.URLError, http.client.HTTPException, ValueError) as error:
        raise UserError.at(url, found=str(error).strip("<>"), allowed=ALLOWED) from None


def unpack_run(archive: Path) -> Path:
    """Unpack an archive, and return its folder; UserError for other settings than params.yaml's."""
    from moecore.study.document import load_yaml_document
    from moecore.study.params_file import list_changes

    unpacked = SCRATCH / "run"
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
    except tarfile.TarError as error:
        raise UserError.at(archive, found=error, allowed="an archive of a run") from None
    theirs = load_yaml_document(str(unpacked / "params.yaml")).data
    ours = load_yaml_document("params.yaml").data
    if change := next(list_changes(ours, theirs), None):
        problem = f"a run with other settings, {change} there"
        raise UserError.at(archive, found=problem, allowed="a run of this params.yaml")
    return unpacked


def pull_outputs(unpacked: Path, is_forced: bool) -> None:
    """Pull the outputs of an unpacked run with DVC, then copy its reports and model cards.

    Raises UserError, and changes nothing, if another run's dvc.lock or outputs that are in no
    cache would be lost; is_forced: replace them.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    locks = [unpacked / "dvc.lock", *unpacked.glob("steps/*/dvc.lock")]
    missing = []
    for path in locks:
        lock = path.relative_to(unpacked)
        before = lock.read_bytes() if lock.is_file() else b""
        if before not in (b"", path.read_bytes()) and not is_forced:
            allowed = "--force, which replaces it and the outputs that it names"
            raise UserError.at(lock, found="another run in this folder", allowed=allowed)
        if not before:
            missing.append(lock)
    for path in locks:
        write_whole(path.relative_to(unpacked), path.read_bytes())
    remote = {"url": str((unpacked / REMOTE).resolve())}
    try:
        with Repo(config={"remote": {"release": remote}}) as repo:
            repo.pull(remote="release", force=is_forced)
    except DvcException as error:
        for lock in missing:
            lock.unlink()
        text = " ".join(str(error).split())
        raise UserError(f"dvc: {text}") from None
    for path in [*unpacked.glob("reports/*"), *unpacked.glob(f"{MODEL_CARDS}/*.md")]:
        target = path.relative_to(unpacked)
        if not target.is_file() or target.read_bytes() != path.read_bytes():
            write_whole(target, path.read_bytes())


def count_stale_stages() -> str:
    """Return a line with the number of stages that would run: other code than the run's."""
    from moecore.pipeline.plan import plan_stages, query_pipeline_status, stages_changed_by_code
    from moecore.study.stages import CODE_STAGE

    pipeline = query_pipeline_status()
    planned = plan_stages(pipeline, {}, stages_changed_by_code(pipeline))
    if number := sum(item.stage != CODE_STAGE for item in planned):
        return f"pulled; stages will rerun: {number}; `moecore plan` says which and why"
    return "pulled; nothing would run"
