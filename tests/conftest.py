"""What all tests share: one finished project for a whole test run, however many workers it has."""

import fcntl
import gc
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import forked
from tests.browser import browser as browser
from tests.project import Project

# No test is timed: on a busy machine any example can take a second.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# Stages that run in a test's process would give torch all cores from then on, and threads of tiny
# products wait for each other: a training of 0.3 s takes 5 s.
os.environ.setdefault("MOECORE_THREADS", "1")
# With every seed torch notes the stack, for 4 ms, in case that a card comes to be used.
if not torch.accelerator.is_available():
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None

# What starts pipelines, processes, compilers, browsers or whole studies: `make quick-test` leaves
# it out but for QUICK. The workers of `make test` take whole files in this order: the first makes
# the finished project, for which those that use it would wait, so others come between.
SLOW = (
    *"pipeline/test_pipeline.py training/test_ranks.py run/test_launch.py".split(),
    *"pipeline/test_installed_package.py training/test_speed.py pipeline".split(),
    *"run/test_inputs.py predict study report tracking stages testing benchmarks".split(),
    *("house/test_additions.py", "house/test_docs.py"),
)
# One pipeline, one kill, one look at what reruns; and what starts nothing
QUICK = (
    "pipeline/test_code_hashes.py",
    "pipeline/test_pipeline.py::test_everything_ran_once_and_then_nothing_runs",
    "pipeline/test_pipeline.py::test_killed_at_random_moments_it_ends_bit_equal[pretrain]",
    "pipeline/test_what_reruns.py::test_a_part_reruns_the_methods_that_use_it",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without what is slow, import no file that is slow as a whole: each worker would, for 8 s."""
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    is_slow = name.startswith(SLOW) and not any(quick.startswith(name) for quick in QUICK)
    return True if config.option.markexpr == "not slow" and is_slow else None


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of commands for all workers, which import their tests meanwhile."""
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[forked.SHARED] = str(forked.start())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import tests without garbage collection, which visits all that was imported before."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # collections during the tests skip what was imported
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and let it come first: no worker is left with it at the end."""
    folders = [f"tests/{name}" for name in SLOW]
    quick = tuple(f"tests/{name}" for name in QUICK)
    ranks = {}
    for item in items:
        places = [place for place, name in enumerate(folders) if item.nodeid.startswith(name)]
        ranks[item] = min(places, default=len(SLOW))
        if places and not item.nodeid.startswith(quick):
            item.add_marker("slow")
    items.sort(key=ranks.__getitem__)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of this test run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def finished(shared) -> Project:
    """A small project whose pipeline has run; tests change nothing in it (see ``copied``)."""
    # The first worker that asks runs it, two stages at a time; the others wait.
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
