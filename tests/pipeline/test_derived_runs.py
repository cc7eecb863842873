"""What is derived: settings from a folder of pictures, methods from a sweep; what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.pipeline import study_runs
from moecore.pipeline.study_runs import write_derived_run
from moecore.study.check import check_study
from moecore.study.document import load_yaml_document, parse_yaml_document
from tests.data.making import image_classes
from tests.project import PARAMS, Project


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    """A project with a folder of 90 grey pictures, which nothing has run."""
    Project(tmp_path).with_dvc()
    image_classes(tmp_path / "pictures", dict.fromkeys("abc", 30), size=(50, 45), mode="L")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def derive(folder: Path | str) -> dict:
    return parse_yaml_document(study_runs.derive_params_text(Path(folder))).data


def test_settings_follow_from_the_pictures(place, monkeypatch):
    """90 pictures: 18 test (0.2), 9 validation, 63 train, so batches of 63 / 4."""
    values = derive("pictures")
    source = values["data"]["pretrain"]
    assert (source["size"], source["channels"], values["model"]["patch"]) == (48, 1, 6)
    assert values["pretrain"]["batch"] == 15
    assert values["pretrain"]["epochs"] * values["pretrain"]["updates"] == 1200
    assert values["few_shot"]["shots"] == [1, 5, 10]
    image_classes(place / "pictures", {"d": 2400}, size=(9, 70))
    monkeypatch.setattr(study_runs, "MIN_STEPS", 200)  # 10 epochs of 1,743 / 64 are 270
    values = derive("pictures")
    source = values["data"]["pretrain"]
    assert (source["size"], source["channels"], values["pretrain"]["batch"]) == (32, 3, 64)
    assert values["pretrain"]["updates"] is None and values["pretrain"]["epochs"] == 10
    # Every class has a picture in each split, also of 14 classes with three
    image_classes(place / "few", {f"c{number}": 3 for number in range(14)})
    checked = check_study(write_derived_run(Path("few"), (), is_sweep=False) / "params.yaml")
    assert "14 train, 14 validation, 14 test" in checked.notes[0]


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("pictures/a", "a: found 0 class folders, and 30 images outside of them; allowed: two or"),
        ("empty", "empty: found 0 class folders, and 0 images outside of them; allowed: two or"),
        ("single", r"single/b: found 1 pictures; allowed: 3 or more per class"),
        ("damaged", r"damaged/a/000\.png: cannot identify image file: .*; repair it, or remove it"),
        ("nowhere", "nowhere: no such folder"),
    ],
)
def test_an_unusable_folder_is_one_line_and_begins_nothing(place, folder, problem):
    (place / "empty").mkdir()
    image_classes(place / "single", {"a": 5, "b": 1})
    image_classes(place / "damaged", {"a": 5, "b": 5})
    (place / "damaged/a/000.png").write_text("no picture", encoding="utf-8")
    with pytest.raises(UserError, match=problem) as refused:
        study_runs.derive_params_text(place / folder)
    assert "\n" not in str(refused.value)


def test_a_training_too_short_to_learn_is_said(place):
    folder = write_derived_run(Path("pictures"), ["pretrain.updates=1"], is_sweep=False)
    assert "pretrain: 10 training steps" in check_study(folder / "params.yaml").notes[-1]
    write_derived_run(Path("pictures"), ["pretrain.updates=10"], is_sweep=False)
    assert len(check_study(folder / "params.yaml").notes) == 1


def test_a_sweep_is_a_method_per_point(place):
    sets = ["methods.vmoe.router.k=[1,4]", "methods.vmoe.regularizers.0.weight=[0,1.0e-3]"]
    folder = write_derived_run(None, [*sets, "run.seeds=[0,1]", "pretrain.epochs=3"], is_sweep=True)
    assert folder == Path(".runs/sweep.vmoe_k_weight")
    values = load_yaml_document(folder / "params.yaml").data
    points = ["vmoe_k1_weight0", "vmoe_k1_weight0_001", "vmoe_k4_weight0", "vmoe_k4_weight0_001"]
    assert values["run"]["methods"] == ["dense", *points, "tgr"]
    assert values["run"]["seeds"] == [0, 1] and values["pretrain"]["epochs"] == 3
    method = values["methods"][points[3]]
    assert (method["router"]["k"], method["regularizers"][0]["weight"]) == (4, 0.001)
    assert method["experts"] == values["methods"]["vmoe"]["experts"]
    check_study(folder / "params.yaml", Path())
    assert (place / "params.yaml").read_text(encoding="utf-8") == PARAMS


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ([], "--sweep: found no list to sweep over; allowed: such as -S 'meth"),
        (
            ["pretrain.epochs=[1,2]"],
            r"-S pretrain.epochs: found 2 values; allowed: .* methods\.NAME",
        ),
        (["methods.vmoe=[1,2]"], "-S methods.vmoe: found 2 values; allowed: lists for keys below"),
        (["methods.vmoe.router.k=[1]"], "router.k: found the key twice, or fewer than two values"),
        (["methods.vmo.router.k=[1,2]"], "methods.vmo: missing, did you mean 'vmoe'"),
        (["methods.vmoe.router.z=[1,2]"], "methods.vmoe_z1.router.z: unknown key"),
        (["methods.vmoe.router.k=[1,1]"], "found two methods that would be called vmoe_k1; "),
        # What a default says in other letters: DVC would train the same twice
        (
            ["methods.vmoe.regularizers.0.weight=[1.0, 1]"],
            "methods.vmoe_weight1_0: found the same settings as vmoe_weight1 has",
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(place, sets, problem):
    with pytest.raises(UserError, match=problem):
        write_derived_run(None, sets, is_sweep=True)
