"""Pictures that are added or deleted after `prepare`: DVC does not see them, moecore says so."""

from typer.testing import CliRunner

from moecore.pipeline.cli import app
from tests.data.making import image_classes
from tests.project import PARAMS, Project

DIGITS = "pretrain: {kind: digits, size: 16}"
FOLDER = "pretrain: {kind: image_folder, root: flowers, size: 16, channels: 1}"
MEND = ["dvc", "repro", "-f", "-s", "prepare@pretrain"]


def test_another_raw_folder_is_said_until_it_is_prepared_again(tmp_path, monkeypatch):
    project = Project(tmp_path, PARAMS.replace(DIGITS, FOLDER)).with_dvc()
    image_classes(tmp_path / "flowers", {"aster": 200, "rose": 200}, size=(4, 4))
    project.run(["dvc", "repro", "-q", "prepare"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moecore.pipeline.parallel.run_pipeline", lambda jobs: None)

    def said(command: str) -> list[str]:
        done = CliRunner().invoke(app, [command], catch_exceptions=False)
        assert done.exit_code == 0
        return [line for line in done.stdout.splitlines() if "flowers:" in line]

    assert not said("check")
    (tmp_path / "flowers/aster/000.png").unlink()
    (tmp_path / "flowers/.hidden").touch()
    for command in ("check", "plan", "run"):
        (line,) = said(command)
        assert line.startswith("params.yaml: data.pretrain: flowers: found 399 files of ")
        assert "saw 400 of" in line and " ".join(MEND) in line
    project.run(MEND)
    assert not said("check")
    (tmp_path / "flowers").rename(tmp_path / "gone")
    assert not said("check"), "what is prepared may be all there is"
