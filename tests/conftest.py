"""What all tests share: one finished project for a whole test run, however many workers it has."""

import fcntl
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from tests.browser import browser as browser
from tests.project import Project

# No test is timed: on a busy machine any example can take a second.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# The workers of `make test` take whole files in this order. The first of these makes the finished
# project; those that use it come later, as they would wait for it.
LONGEST = (
    "pipeline/test_pipeline.py",
    "training/test_ranks.py",
    "run/test_launch.py",
    "pipeline/test_installed_package.py",
    "pipeline/test_cli.py",
    "pipeline/test_parallel.py",
    "pipeline/test_what_reruns.py",
    "training/test_speed.py",
    "pipeline/test_kill_and_resume.py",
    "predict/test_export.py",
    "pipeline/test_paper_methods.py",
    "report/test_page_in_browser.py",
    "study/test_checking.py",
    "pipeline/test_image_text.py",
    "tracking/test_sync.py",
    "pipeline/test_presets.py",
    "testing/test_own_parts.py",
    "pipeline/test_begin_project.py",
    "report/test_report.py",
    "tracking/test_ui.py",
    "report/test_columns.py",
    "pipeline/test_surgery.py",
    "report/test_explorer_in_browser.py",
    "run/test_inputs.py",
    "pipeline/test_brain_age.py",
    "pipeline/test_language.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no worker is left with one at the end."""
    tests = Path(__file__).parent
    rank = {str(tests / name): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(str(item.path), len(rank)))


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of this test run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def finished(shared) -> Project:
    """A small project whose pipeline has run; tests look at it and change nothing (see ``copied``).

    The first worker that asks runs it, two stages at a time; the others wait.
    """
    folder = shared / "finished"
    with open(shared / "finished.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "finished.done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            project = Project(folder).with_dvc()
            done = project.moecore("run", "--jobs", "2")
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            (shared / "finished.done").write_text(done.stdout, encoding="utf-8")
    return Project.at(folder)


@pytest.fixture
def copied(finished, tmp_path) -> Project:
    """A copy of the finished project, to be changed."""
    return finished.copy(tmp_path / "project")


@contextmanager
def _limited(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def limited() -> Callable[[int], AbstractContextManager[None]]:
    """``with limited(size)``: a file may have so many bytes, as on a disk that is full then."""
    return _limited


class Disk:
    """A disk of its own, of 8 MB: what is written past its end meets a full disk indeed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, free: int = 0) -> None:
        """All but ``free`` bytes of it are taken."""
        self.clear()
        state = os.statvfs(self.folder)
        taken = state.f_bavail * state.f_frsize - free
        with open(self._filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, taken)

    def clear(self) -> None:
        """There is room again."""
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    """Skips the test where nothing may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a disk to fill can be mounted by root alone")
    if (done := subprocess.run(mounting, capture_output=True, text=True)).returncode:
        pytest.skip(f"a disk to fill cannot be mounted here: {done.stderr.strip()}")
    yield Disk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)
