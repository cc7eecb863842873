"""`moecore pull` in a fresh clone, from an archive of `python -m tools.release`."""

import platform
import tarfile

import pytest

from moecore.core.files import UserError
from moecore.pipeline.project import LOCK, hold_project
from moecore.pipeline.pull import unpack_run
from tests.project import Project
from tools.release import pack_run

MODEL = "artifacts/pretrain/vmoe/0/model.json"


@pytest.fixture
def archive(copied, tmp_path):
    return pack_run(copied.folder, tmp_path / "dist")


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "clone").mkdir()
    return Project(tmp_path / "clone").with_dvc()


def refused(clone: Project, *words: str) -> str:
    done = clone.moecore("pull", *words)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_after_a_pull_nothing_runs_and_nothing_of_another_run_is_lost(archive, clone, copied):
    source = ("--from", str(archive.parent))
    leftover = clone.folder / f".state/.pull.{platform.node()}.99999999.part"  # of a killed pull
    leftover.mkdir(parents=True)
    (clone.folder / "dvc.lock").write_bytes((copied.folder / "dvc.lock").read_bytes())
    done = clone.moecore("pull", *source)
    assert "stages that would run: 0" in done.stdout, done.stderr
    assert clone.stale() == {} and not leftover.exists()
    for name in (MODEL, "reports/index.html", "reports/compare.json"):
        assert (clone.folder / name).read_bytes() == (copied.folder / name).read_bytes()
    card = (clone.folder / "artifacts/model_cards/finetune.vmoe.0.md").read_text(encoding="utf-8")
    assert "router `noisy_top_k`" in card and "95 % interval" in card and "CC BY 4.0" in card

    (clone.folder / MODEL).write_text("mine", encoding="utf-8")
    assert MODEL in refused(clone, *source)
    assert (clone.folder / MODEL).read_text(encoding="utf-8") == "mine"
    (clone.folder / "dvc.lock").write_text("schema: '2.0'\n")
    assert "dvc.lock: found another run" in refused(clone, *source)
    assert clone.moecore("pull", *source, "--force").returncode == 0
    assert (clone.folder / MODEL).read_bytes() == (copied.folder / MODEL).read_bytes()


def test_what_cannot_be_pulled_is_one_line(archive, clone, copied):
    assert "pull: found no remote" in refused(clone)
    assert "No such file" in refused(clone, "--from", str(clone.folder))
    with hold_project(clone.folder / LOCK):
        assert "has been running the stages" in refused(clone, "--from", str(archive))
    clone.edit("shots: 20", "shots: 21")
    assert "finetune.shots: 21 → 20" in refused(clone, "--from", str(archive))
    archive.write_bytes(b"x")
    assert "damaged" in refused(clone, "--from", archive.as_uri())
    assert not (clone.folder / "dvc.lock").exists()
    copied.edit("shots: 20", "shots: 21")
    with pytest.raises(UserError, match="stages that would run"):
        pack_run(copied.folder, archive.parent)


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "link"])
def test_an_archive_with_links_or_other_places_is_refused(tmp_path, name):
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
    archive = tmp_path / "run.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(member)
    with pytest.raises(UserError, match=r"a link or a place outside of the archive; allowed"):
        unpack_run(archive)
    assert [path.name for path in tmp_path.iterdir()] == ["run.tar"]
