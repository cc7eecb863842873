"""`moecore tune`, what is derived from pictures or a sweep, and `moecore pull`."""

import json
import platform
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from dvc.exceptions import DvcException
from dvc.repo import Repo

from moecore.core.files import UserError, write_atomic
from moecore.data.prepared import Prepared, Split
from moecore.pipeline import run_folders, tune
from moecore.pipeline.project_record import LOCK, hold_project_lock
from moecore.pipeline.pull import pull_outputs, unpack_and_check_run
from moecore.pipeline.run_folders import write_data_or_sweep_run
from moecore.study.check import check_study
from moecore.study.questions import QuestionFile
from moecore.study.yaml_document import load_yaml_document, parse_yaml_document
from tests.data.making import image_classes
from tests.project import PARAMS, Project
from tools.release import pack_run

QUESTION = """\
stages: [prepare, teacher_router, pretrain, compare]
run: {phases: [pretrain]}
methods: {dense: {}, vmoe: {}, few: {from: vmoe, experts: {number: 2}}}
teacher: {kind: no_teacher}
tune: {learning_rates: [1.0e-4, 2.0e-3, 1.0e-2], seeds: [8, 9]}
rounds:
  - {seeds: 0-1, methods: [dense, vmoe]}
  - {seeds: [4], methods: [few]}
"""


@pytest.fixture
def project(tmp_path) -> Project:
    path = tmp_path / "pipelines/own/tuned.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(QUESTION, encoding="utf-8")
    return Project.of_settings(tmp_path)


def question(project: Project) -> QuestionFile:
    return QuestionFile(project.folder, "own/tuned")


def kept_rates(project: Project, **chosen: float) -> dict:
    """Write the file of a tuning that chose these rates, without training."""
    run = tune.plan_tuning(question(project))
    rates = list(run.tuning.learning_rates)
    methods = {name: {"learning_rate": rate, "scores": []} for name, rate in chosen.items()}
    kept = {"settings": run.digest, "learning_rates": rates, "methods": methods}
    run.question.update_results_file("tuned", kept)
    return kept


def test_every_method_is_trained_with_every_rate_and_a_round_has_the_chosen_ones_of_its_own(
    project,
):
    run = tune.plan_tuning(question(project))
    data = parse_yaml_document(run.text).data
    assert run.methods == ("dense", "vmoe", "few")
    assert data["run"]["seeds"] == [8, 9] and len(data["run"]["methods"]) == 9
    names = ("few_at_0_0001", "few_at_0_002", "few_at_0_01")  # by value: a shifted grid reuses some
    rates = [data["methods"][name]["pretrain"] for name in names]
    assert rates == [{"learning_rate": rate} for rate in (1e-4, 2e-3, 1e-2)]
    experts = [data["methods"][f"{name}_at_0_002"]["experts"]["number"] for name in ("vmoe", "few")]
    assert experts[1] == 2 != experts[0]
    assert run.stages == ("prepare", "teacher_router", "pretrain", "compare")
    kept_rates(project, dense=2e-3, vmoe=2e-3, few=1e-4)
    first, second = (part.compose().document.data["methods"] for part in question(project).rounds)
    assert list(first) == ["dense", "vmoe"] and list(second) == ["few"]
    assert first["vmoe"]["pretrain"] == {"learning_rate": 2e-3}
    assert second["few"]["pretrain"] == {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("scores", "better", "best"),
    [
        ([[0.5, 0.7], [0.6, 0.7], [0.9, 0.2]], "higher", 1),
        ([[0.5, 0.7], [0.6, 0.7], [0.9, 0.2]], "lower", 2),
        ([[0.5], [0.5], [0.4]], "higher", 0),  # equally good: the lower rate
        ([[float("nan")], [0.1], [float("inf")]], "higher", 1),
        ([[float("nan")], [9.0], [float("-inf")]], "lower", 1),
    ],
)
def test_the_best_rate_is_that_of_the_best_mean(scores, better, best):
    assert tune.index_of_best_rate(scores, better) == best


EIGEN = "eigen: {router: {kind: eigenbasis, threshold: 0.5}, experts: {kind: eigen, number: 4}}"
THRESHOLD = "seeds: [8, 9], threshold: {method: eigen, values: [-0.2, 0, 0.2]}"


@pytest.fixture
def with_threshold(project) -> QuestionFile:
    text = QUESTION.replace("few: {from: vmoe, experts: {number: 2}}", EIGEN)
    text = text.replace("few", "eigen").replace("seeds: [8, 9]", THRESHOLD)
    question(project).path.write_text(text, encoding="utf-8")
    return question(project)


def test_a_threshold_is_trained_with_used_by_all_methods_that_have_one_and_refused_to_others(
    with_threshold,
):
    entries = parse_yaml_document(tune.plan_tuning(with_threshold).text).data["methods"]
    thresholds = [settings["router"]["threshold"] for settings in entries.values()]
    assert thresholds == [-0.2, 0, 0.2]
    assert set(entries) == {"eigen_at_minus_0_2", "eigen_at_0", "eigen_at_0_2"}
    run = tune.plan_tuning(with_threshold, 0.0)
    entries = parse_yaml_document(run.text).data["methods"]
    assert len(entries) == 9 and entries["eigen_at_0_01"]["pretrain"] == {"learning_rate": 1e-2}
    assert entries["eigen_at_0_01"]["router"]["threshold"] == 0
    assert "threshold" not in entries["vmoe_at_0_01"]["router"]
    methods = {
        name: {"learning_rate": 2e-3, "also": run.also.get(name, {})} for name in run.methods
    }
    kept = {"settings": run.digest, "learning_rates": [1e-4, 2e-3, 1e-2], "methods": methods}
    with_threshold.update_results_file("tuned", kept | {"threshold": {"chosen": 0.0}})
    assert not list(tune.list_tuning_problems(with_threshold))
    used = with_threshold.rounds[1].compose().document.data["methods"]["eigen"]
    assert used["router"]["threshold"] == 0 and used["pretrain"] == {"learning_rate": 2e-3}
    text = with_threshold.path.read_text("utf-8").replace("method: eigen", "method: vmoe")
    with_threshold.path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"tune.threshold.method: found vmoe; allowed: eigen"):
        tune.plan_tuning(QuestionFile(with_threshold.root, with_threshold.name))


@pytest.mark.parametrize(("shares", "chosen"), [((0, 0.003, 0.4), 0), ((0.01, 0.02, 0.4), None)])
def test_the_threshold_with_the_nearest_fallback_is_chosen(
    with_threshold, monkeypatch, shares, chosen
):
    fallback = dict(zip((-0.2, 0, 0.2), shares, strict=True))
    monkeypatch.setattr(tune.Prepared, "open", lambda folder: Prepared({}, *[Split([], [])] * 3))
    monkeypatch.setattr(tune, "load_model", lambda folder: folder)
    monkeypatch.setattr(tune, "predict_in_batches", lambda *_: ((), ()))
    monkeypatch.setattr(
        tune, "mean_routing_metrics", lambda _, k, value: {"fallback": fallback[value]}
    )
    run = tune.plan_tuning(with_threshold)
    if chosen is None:
        with pytest.raises(UserError, match=r"tune.threshold.values: found -0.2 as the best"):
            tune.choose_fallback_threshold(run, run.tuning.threshold)
    else:
        assert tune.choose_fallback_threshold(run, run.tuning.threshold)["chosen"] == chosen


def test_a_choice_at_an_end_of_the_grid_is_refused(project):
    kept = kept_rates(project, dense=1e-4, vmoe=2e-3, few=1e-2)
    lines = list(tune.list_edge_choices(question(project), kept))
    assert lines == list(tune.list_tuning_problems(question(project)))
    where = f"{question(project).path}:5:8: tune.learning_rates: "
    end = " an end of the grid; allowed: a grid that goes on to"
    first = f"{where}found 0.0001 as the best rate of dense,{end} lower rates"
    assert lines == [first, f"{where}found 0.01 as the best rate of few,{end} higher rates"]


def test_rates_chosen_for_other_settings_are_refused(project):
    (missing,) = tune.list_tuning_problems(question(project))
    assert "own/tuned.json: rates were not chosen; run `moecore tune own/tuned`" in missing
    project.copy_code()
    done = project.with_dvc().moecore("study", "run", "own/tuned")
    assert done.returncode and missing in done.stderr
    kept_rates(project, dense=2e-3, vmoe=2e-3, few=2e-3)
    assert not list(tune.list_tuning_problems(question(project)))
    question(project).path.write_text(QUESTION.replace("number: 2", "number: 3"), encoding="utf-8")
    (changed,) = tune.list_tuning_problems(question(project))
    assert "rates were chosen for other settings" in changed
    text = QUESTION.replace("{seeds: 0-1", "{seeds: 3")
    question(project).path.write_text(text, encoding="utf-8")
    done = project.moecore("study", "check", "own/tuned")
    refused = "run.seeds: found 3 (int); allowed: a list"
    assert done.returncode and refused in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[8, 9]", "[4]", ":5:50: tune.seeds: found 4, a seed of a round; allowed: seeds"),
        ("[1.0e-4, 2", "[3.0e-3, 2", ":5:8: tune.learning_rates: found [0.003, 0.002, 0.01]"),
        ("1.0e-4, 2", "2", "tune.learning_rates: found"),
        ("tune: ", "#", "found no section tune; allowed: tune: {learning_rates:"),
        ("{seeds: 0-1", "{seeds: 3", ":7:6: run.seeds: found 3 (int); allowed: a list"),
    ],
)
def test_a_wrong_grid_is_one_line(project, old, new, message):
    question(project).path.write_text(QUESTION.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as error:
        tune.plan_tuning(question(project))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rates_are_chosen_by_trainings_and_used(project):
    path = question(project).path
    text = QUESTION.replace(", few: {from: vmoe, experts: {number: 2}}", "").replace(
        "[8, 9]", "[8]"
    )
    path.write_text(text.partition("rounds:")[0] + "seeds: [0]\n", encoding="utf-8")
    project.copy_code()
    done = project.with_dvc().moecore("tune", "own/tuned")
    kept = question(project).read_results()["tuned"]
    run = tune.plan_tuning(question(project))
    assert kept == json.loads(json.dumps(tune.choose_and_store(run)))
    for name in ("dense", "vmoe"):
        choice = kept["methods"][name]
        means = [seeds[0] for seeds in choice["scores"]]
        assert choice["learning_rate"] == kept["learning_rates"][means.index(max(means))]
        history = run.folder / f"artifacts/measured/pretrain/{name}_at_0_0001/8.json"
        assert history.is_file() and len(choice["curves"]) == 3 and choice["curves"][0]
    rates = [choice["learning_rate"] for choice in kept["methods"].values()]
    is_edge = any(rate != kept["learning_rates"][1] for rate in rates)
    assert ("an end of the grid" in done.stderr) == is_edge == bool(done.returncode)
    assert "validation accuracy at a learning rate of" in done.stdout


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    """A project with a folder of 90 grey pictures, which nothing has run."""
    Project.of_settings(tmp_path)
    (tmp_path / ".dvc").mkdir()
    image_classes(tmp_path / "pictures", dict.fromkeys("abc", 30), size=(50, 45), mode="L")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def derive(folder: Path | str) -> dict:
    return parse_yaml_document(run_folders.derive_params_from_pictures(Path(folder))).data


def test_settings_follow_from_the_pictures(place, monkeypatch):
    """90 pictures: 18 test (0.2), 9 validation, 63 train, so batches of 63 / 4."""
    values = derive("pictures")
    source = values["data"]["pretrain"]
    assert (source["size"], source["channels"], values["model"]["patch"]) == (48, 1, 6)
    assert values["pretrain"]["batch"] == 15
    assert values["pretrain"]["epochs"] * values["pretrain"]["updates"] == 1200
    assert values["few_shot"]["shots"] == [1, 5, 10]
    image_classes(place / "pictures", {"d": 2400}, size=(9, 70))
    monkeypatch.setattr(run_folders, "MIN_STEPS", 200)  # 10 epochs of 1,743 / 64 are 270
    values = derive("pictures")
    source = values["data"]["pretrain"]
    assert (source["size"], source["channels"], values["pretrain"]["batch"]) == (32, 3, 64)
    assert values["pretrain"]["updates"] is None and values["pretrain"]["epochs"] == 10
    # Every class has a picture in each split, also of 14 classes with three
    image_classes(place / "few", {f"c{number}": 3 for number in range(14)})
    checked = check_study(write_data_or_sweep_run(Path("few"), (), is_sweep=False) / "params.yaml")
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
        run_folders.derive_params_from_pictures(place / folder)
    assert "\n" not in str(refused.value)


def test_a_training_too_short_to_learn_is_said(place):
    folder = write_data_or_sweep_run(Path("pictures"), ["pretrain.updates=1"], is_sweep=False)
    assert "pretrain: 10 training steps" in check_study(folder / "params.yaml").notes[-1]
    write_data_or_sweep_run(Path("pictures"), ["pretrain.updates=10"], is_sweep=False)
    assert len(check_study(folder / "params.yaml").notes) == 1


def test_a_sweep_is_a_method_per_point(place):
    sets = ["methods.vmoe.router.k=[1,4]", "methods.vmoe.regularizers.0.weight=[0,1.0e-3]"]
    folder = write_data_or_sweep_run(
        None, [*sets, "run.seeds=[0,1]", "pretrain.epochs=3"], is_sweep=True
    )
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
        write_data_or_sweep_run(None, sets, is_sweep=True)


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
    with hold_project_lock(clone.folder / LOCK):
        assert "has been running the stages" in refused(clone, "--from", str(archive))
    clone.edit("shots: 20", "shots: 21")
    assert "finetune.shots: 21 → 20" in refused(clone, "--from", str(archive))
    archive.write_bytes(b"x")
    assert "damaged" in refused(clone, "--from", archive.as_uri())
    assert not (clone.folder / "dvc.lock").exists()
    copied.edit("shots: 20", "shots: 21")
    with pytest.raises(UserError, match="stages that would run"):
        pack_run(copied.folder, archive.parent)


def test_a_forced_pull_that_fails_leaves_the_lock_of_the_old_run(clone, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise DvcException("a file is missing")

    (clone.folder / "dvc.lock").write_text("schema: '2.0'\n")
    for name in ("dvc.lock", "steps/own/dvc.lock"):
        write_atomic(tmp_path / "run" / name, "stages: {}\n")
    monkeypatch.chdir(clone.folder)
    monkeypatch.setattr(Repo, "pull", fail)
    with pytest.raises(UserError, match=r"dvc: a file is missing"):
        pull_outputs(tmp_path / "run", is_forced=True)
    assert Path("dvc.lock").read_text() == "schema: '2.0'\n"
    assert not Path("steps/own/dvc.lock").exists()


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "link"])
def test_an_archive_with_links_or_other_places_is_refused(tmp_path, name):
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
    archive = tmp_path / "run.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(member)
    with pytest.raises(UserError, match=r"a link or a place outside of the archive; allowed"):
        unpack_and_check_run(archive)
    assert [path.name for path in tmp_path.iterdir()] == ["run.tar"]
