"""Pictures that are added or deleted after `prepare`: DVC does not see them, moecore says so."""

from tests.data.making import image_classes
from tests.project import PARAMS, Project

DIGITS = "pretrain: {kind: digits, size: 16}"
FOLDER = "pretrain: {kind: image_folder, root: flowers, size: 16, channels: 1}"
MEND = ["dvc", "repro", "-q", "-f", "-s", "prepare@pretrain"]


def test_another_raw_folder_is_said_until_it_is_prepared_again(tmp_path):
    project = Project(tmp_path, PARAMS.replace(DIGITS, FOLDER)).with_dvc()
    image_classes(tmp_path / "flowers", {"aster": 200, "rose": 200}, size=(4, 4))
    project.run(["dvc", "repro", "-q", "prepare"])
    assert "flowers:" not in project.moecore("check").stdout
    (tmp_path / "flowers/aster/000.png").unlink()
    (tmp_path / "flowers/.hidden").touch()
    for command in ("check", "plan"):
        lines = project.moecore(command).stdout.splitlines()
        [said] = [line for line in lines if "data.pretrain: flowers:" in line]
        assert "found 399 files" in said and "saw 400" in said and " ".join(MEND[:2]) in said
    project.run(MEND)
    assert "flowers:" not in project.moecore("check").stdout
    (tmp_path / "flowers").rename(tmp_path / "gone")
    assert "flowers:" not in project.moecore("plan").stdout, "what is prepared may be all there is"
