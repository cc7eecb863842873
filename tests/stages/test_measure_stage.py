"""The stages measure, calculate, out_of_fold, prepare and code, and a way to the explorer."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from moecore import Prepared, UserError
from moecore.brain import age_predictions as brain
from moecore.brain.age_correction import ModelAges, fit_calibrator
from moecore.brain.age_predictions import assign_folds, read_predictions
from moecore.core import config, source_layout
from moecore.core.files import read_json
from moecore.measure import stability
from moecore.measure.base import Measurement, SkipReason, read_result
from moecore.measure.calibrators.linear import Linear
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import ImageSpec
from moecore.pipeline import code_hashes
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.pipeline.dvc_yaml import build_stage_entries, study_dvc_yaml_texts
from moecore.report.figures.overview import draw_dataset_samples
from moecore.report.tables.metrics_by_method import unanswerable_claims
from moecore.stages import code as code_stage
from moecore.stages import out_of_fold as stage
from moecore.stages.calculate import calculate
from moecore.stages.compare import compare
from moecore.stages.measure import measure
from moecore.stages.prepare import prepare
from moecore.study.check import check_study, check_without_data
from moecore.study.yaml_document import load_yaml_document, parse_yaml_document
from moecore.testing import check_calculation
from moecore.training.artifacts import record_no_guide_needed, save_model
from tests.data.making import leaning, write_cohort
from tests.measure.subjects import digits, in_run
from tests.methods import tiny
from tests.my_lab import forget_package, write_my_lab
from tests.project import PARAMS as SMALL_PARAMS
from tests.project import Project

SWEEPS = {"k": [1], "threshold": [], "images": 4}
SECTIONS = {"routing": {"images": 8, "augmentations": ["flip"], "sweeps": SWEEPS}}
SECTIONS |= {"stability": {"images": 4, "steps": 2, "sigmas": [0.1, 0.2]}, "cohort_checks": {}}
SECTIONS |= {"methods": {"dense": {}}}
NAMES = ("dense", "teacher_routed")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with data and two models of two phases; the second routes by its teacher."""
    folder = tmp_path_factory.mktemp("measure")
    (folder / "artifacts/teacher_router/dense/0").mkdir(parents=True)
    record_no_guide_needed(folder / "artifacts/teacher_router/dense/0")
    for phase in ("pretrain", "finetune"):
        data = digits(folder / "artifacts/data" / phase)
        for name in NAMES:
            target = folder / "artifacts" / phase / name / "0"
            target.mkdir(parents=True)
            save_model(target, tiny(name, ImageSpec.from_card(data.card)))
    return folder


@pytest.fixture
def inside(project, monkeypatch):
    in_run(monkeypatch, project, **SECTIONS)


def found(what, phase, method):
    path = f"artifacts/measured/{what}/{phase}/{method}/0.json"
    return read_result(path, Found, what)


@pytest.mark.usefixtures("inside")
def test_the_teacher_is_asked_on_the_images_of_the_pretraining_alone():
    for phase in ("pretrain", "finetune"):
        measure("routing", phase, "teacher_routed", 0)
    routing = found("routing", "pretrain", "teacher_routed")
    assert routing.find("teacher_agreement").value == 1, "it decides"
    assert found("routing", "finetune", "teacher_routed").find("teacher_agreement") is None


@pytest.mark.usefixtures("inside")
def test_what_does_not_apply_says_why():
    measure("routing", "pretrain", "dense", 0)
    assert found("routing", "pretrain", "dense").skipped == "a dense model has no routing"
    measure("cohort_checks", "pretrain", "dense", 0)
    assert "classes, not ages" in found("cohort_checks", "pretrain", "dense").skipped


@pytest.mark.usefixtures("inside")
def test_a_killed_measurement_goes_on_with_the_same_bits(monkeypatch):
    measure("stability", "pretrain", "dense", 0)
    path = "artifacts/measured/stability/pretrain/dense/0.json"
    whole = json.loads(open(path).read())
    compared = []
    changes = stability.compute_choice_iou_drop

    def compare(*records):
        compared.append(records)
        if len(compared) == 2:
            raise KeyboardInterrupt
        return changes(*records)

    monkeypatch.setattr(stability, "compute_choice_iou_drop", compare)
    with pytest.raises(KeyboardInterrupt):
        measure("stability", "pretrain", "dense", 0)
    measure("stability", "pretrain", "dense", 0)
    assert len(compared) == 3, "the first sigma was kept"
    assert json.loads(open(path).read()) == whole


PARAMS = """\
run:
  {methods: [vmoe], seeds: [0], phases: [pretrain], measurements: [explorer],
  thorough: [pretrain]}
data: {pretrain: {kind: digits, size: 16, train_limit: 128, test_limit: 40}}
model: {kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}
methods:
  vmoe:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
teacher_router: {steps: 2, batch: 64, learning_rate: 0.01}
pretrain: {epochs: 2, batch: 64, learning_rate: 0.001}
explorer:
  {images: 4, gallery: 20, epsilons: [0.05], attack: {kind: pgd, steps: 2},
  augmentations: [shift]}
"""
DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


def test_the_page_shows_the_epochs_of_a_training(tmp_path):
    explored = Project(tmp_path, PARAMS)
    stages = build_stage_entries(["prepare", "teacher_router", "pretrain", "measure"])
    text = study_dvc_yaml_texts(stages, {})["dvc.yaml"]
    (tmp_path / "dvc.yaml").write_text(text, encoding="utf-8")
    for words in ("prepare pretrain", "teacher_router vmoe 0", "pretrain vmoe 0"):
        explored.stage(*words.split())
    explored.stage("measure", "explorer", "pretrain", "vmoe", "0")
    explored.stage("compare")
    page = (tmp_path / "reports/explorer.html").read_text(encoding="utf-8")
    (vmoe,) = json.loads(DATA.search(page)[1])["phases"][0]["methods"]
    shown = vmoe["model"]["shown"]
    kinds = [one["kind"] for one in shown]
    assert kinds == ["clean", *["noise"] * 4, "attack", "augmentation", "epoch", "epoch"]
    clean = shown[0]["trace"]
    last = shown[-1]["trace"]
    assert last["answers"][:4] == clean["answers"], "the last epoch is the trained model"
    assert shown[-1]["label"] == "epoch 2 of 2"
    assert shown[-2]["trace"]["values"][:4] != clean["values"]


RESULT = "artifacts/measured/out_of_fold/pretrain/dense/0.json"
OUT_OF_FOLD_PARAMS = """
run: {methods: [dense]}
model: {kind: vit3d, patch: 8, width: 16, depth: 1, heads: 2}
pretrain: {epochs: 1, batch: 4, learning_rate: 1.0e-3}
methods: {dense: {}}
out_of_fold: {folds: 3}
calibrate: {calibrator: {kind: linear, fit_on: out_of_fold}}
"""


def test_folds_split_no_participant_and_have_old_and_young():
    people = [f"p{number // 2}" for number in range(60)]  # two sessions each
    ages = np.repeat(np.linspace(40, 90, 30), 2)
    folds = assign_folds(people, ages, 5, 0)
    assert (folds[::2] == folds[1::2]).all() and np.bincount(folds).tolist() == [12] * 5
    assert all(abs(ages[folds == fold].mean() - 65) < 5 for fold in range(5))
    assert not np.array_equal(folds, assign_folds(people, ages, 5, 1))
    assert np.array_equal(folds, assign_folds(people, ages, 5, 0))
    with pytest.raises(UserError, match="at most 30, the participants"):
        assign_folds(people, ages, 31, 0)


def test_every_volume_is_predicted_by_a_model_without_its_participant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_THREADS", "1")
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    (tmp_path / "params.yaml").write_text(OUT_OF_FOLD_PARAMS)
    write_all_hashes("params.yaml")
    numbers = {"train": 12, "validation": 4, "test": 4}
    data = write_cohort(tmp_path / "artifacts/data/pretrain", numbers=numbers)
    trained = []
    asked = []
    job_without = brain.build_fold_job
    predictions = brain.predict_in_batches

    def without(recipe, opened, kept, *rest):
        trained.append(set(kept.tolist()))
        return job_without(recipe, opened, kept, *rest)

    def spied(model, images, *rest, **words):
        asked.append(len(images))
        return predictions(model, images, *rest, **words)

    monkeypatch.setattr(brain, "build_fold_job", without)
    monkeypatch.setattr(brain, "predict_in_batches", spied)
    stage.out_of_fold("dense", 0)
    path = tmp_path / "artifacts/out_of_fold/pretrain/dense/0/predictions.csv"
    rows = read_predictions(path)
    people = [row["participant_id"] for row in data.subjects("train")]
    assert [row["participant_id"] for row in rows] == people
    assert sum(asked) == 12 and len(trained) == 3
    for place, row in enumerate(rows):
        kept = trained[int(row["qc_flags"].rpartition("fold ")[2])]
        assert place not in kept and people[place] not in {people[other] for other in kept}
    (tmp_path / "w").write_bytes(b"")
    ages = ModelAges.of(data, leaning(data), tmp_path / "w")
    assert fit_calibrator(ages, Linear(fit_on="out_of_fold", min_slope=1e-9), path).n == 12
    result = read_result(tmp_path / RESULT, brain.OutOfFoldMae, "out_of_fold")
    predicted = np.array([float(row["predicted_age"]) for row in rows])
    assert result.mae == pytest.approx(np.abs(predicted - data.train.labels).mean(), abs=1e-3)


def test_nothing_is_trained_where_the_calibration_needs_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    text = OUT_OF_FOLD_PARAMS.replace("fit_on: out_of_fold", "fit_on: validation")
    (tmp_path / "params.yaml").write_text(text)
    write_all_hashes("params.yaml")
    numbers = {"train": 12, "validation": 4, "test": 4}
    write_cohort(tmp_path / "artifacts/data/pretrain", numbers=numbers)
    monkeypatch.setattr(brain, "build_fold_job", lambda *given: pytest.fail("a model was trained"))
    stage.out_of_fold("dense", 0)
    files = (tmp_path / "artifacts/out_of_fold/pretrain/dense/0").iterdir()
    assert [path.name for path in files] == ["absent.json"]
    result = read_result(tmp_path / RESULT, brain.OutOfFoldMae, "out_of_fold")
    assert isinstance(result, SkipReason) and "other predictions" in result.skipped


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def prepare_from(study: Path, source: str) -> None:
    (study / "params.yaml").write_text(f"run: {{methods: []}}\ndata:\n  finetune: {source}\n")
    write_all_hashes("params.yaml")
    prepare("finetune")


def test_prepare_writes_data_and_history(study):
    prepare_from(study, "{kind: digits, size: 14, train_limit: 100}")
    opened = Prepared.open("artifacts/data/finetune", verify=True)
    assert opened.train.images.shape == (100, 1, 14, 14)
    history = study / "artifacts/history/prepare/finetune/history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert any(line.get("dataset", {}).get("kind") == "digits" for line in lines)


def test_a_failure_leaves_what_was_there_whose_contact_sheet_has_a_row_a_class(study):
    prepare_from(study, "{kind: digits}")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        prepare_from(study, "{kind: image_folder, root: nowhere}")
    opened = Prepared.open("artifacts/data/finetune")
    axes = draw_dataset_samples(opened, shots=3).axes
    assert opened.card["kind"] == "digits"
    assert len(axes) == 30 and [axis.get_ylabel() for axis in axes[::3]] == list("0123456789")


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[str]:
    source = tmp_path / "source"
    compiled = shutil.ignore_patterns("__pycache__")
    for name in ("moecore", "stages", "conformance/suite"):
        shutil.copytree(source_layout.ROOT / name, source / name, ignore=compiled, symlinks=True)
    monkeypatch.setattr(code_hashes, "ROOT", source)
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(SMALL_PARAMS, encoding="utf-8")
    for phase in ("pretrain", "finetune"):
        card = Path("artifacts/data", phase, "card.json")
        card.parent.mkdir(parents=True)
        card.touch()
    checked: list[str] = []
    monkeypatch.setattr(code_stage, "check_params_data_models", checked.append)
    code_stage.code()
    code_stage.code()
    assert checked == ["params.yaml"], "the second time there was nothing to do"
    return checked


def test_an_edit_of_what_it_reads_or_writes_is_noticed(runs):
    edited = (
        "source/moecore/report/page/page_objects.py",
        "source/stages/pretrain.py",
        "params.yaml",
    )
    edited += ("dvc.yaml", "artifacts/code/stages/pretrain.json", "source/moecore/nn/new.py")
    for number, path in enumerate(edited, 2):
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as handle:
            handle.write("\n# edited\n")
        code_stage.code()
        assert len(runs) == number, path
        hashes = Path("artifacts/code/stages/pretrain.json").read_text(encoding="utf-8")
        assert "edited" not in hashes


def test_what_is_gone_is_noticed(runs):
    shutil.rmtree("artifacts/code")
    code_stage.code()
    assert len(runs) == 2 and Path("artifacts/code/stages/pretrain.json").is_file()
    Path("artifacts/code/settings/pretrain.json").unlink()
    code_stage.code()
    assert len(runs) == 3
    Path("artifacts/data/finetune/card.json").unlink()  # its raw data count again
    code_stage.code()
    assert len(runs) == 4


def test_a_refused_study_is_checked_again(runs, monkeypatch):
    Path("params.yaml").write_text(SMALL_PARAMS + "\n", encoding="utf-8")

    def refuse(path: str) -> None:
        runs.append(path)
        raise UserError(f"{path}: refused")

    monkeypatch.setattr(code_stage, "check_params_data_models", refuse)
    for _ in range(2):
        with pytest.raises(UserError, match="refused"):
            code_stage.code()
    assert len(runs) == 3


def test_an_edit_during_the_check_is_noticed_by_the_next_run(runs, monkeypatch):
    file = Path("source/moecore/nn/dispatch.py")
    Path("params.yaml").write_text(SMALL_PARAMS + "\n", encoding="utf-8")

    def edit_meanwhile(path: str) -> None:
        runs.append(path)
        file.write_text(file.read_text(encoding="utf-8") + "\nEDITED = 1\n", encoding="utf-8")

    monkeypatch.setattr(code_stage, "check_params_data_models", edit_meanwhile)
    code_stage.code()
    monkeypatch.setattr(code_stage, "check_params_data_models", runs.append)
    code_stage.code()
    assert len(runs) == 3


def test_a_damaged_record_is_no_error(runs):
    Path(".state/code.sha256").write_bytes(b"\xff torn")
    code_stage.code()
    code_stage.code()
    assert len(runs) == 2


BOUND = '''\
from moecore.parts import Calculation, Chart, Metric, OnPage, Values

class Bound(Calculation):
    """Powers of two numbers."""
    metrics = {
        "power": Metric("Power {}", over="n"),
        "largest": Metric("Largest power", form="count"),
    }
    page = OnPage("powers", charts=(Chart("power", "n", "Powers", "n", "power"),))
    highest: int = 3

    def places(self):
        return {"n": range(1, self.highest + 1)}

    def calculate(self, out: Values) -> None:
        for n in self.places()["n"]:
            out.piece(f"{n}", lambda part: part.put("power", np.array([2.0, 3.0, 4.0]) ** n, n=n))
        out.put("largest", 4**self.highest)
'''.replace("from", "import numpy as np\nfrom", 1)
PICTURES = """\
from matplotlib.figure import Figure
from moecore.report.results_and_displays import Pictures

PICTURES = Pictures("my_lab.bound", lambda found: [("a_curve", Figure())])
"""
CALCULATED = """\
packages: [my_lab]
run: {methods: [], seeds: [], phases: [], calculations: [my_lab.bound]}
my_lab: {bound: {highest: 2}}
questions:
  - {asks: do squares grow, metric: power_2, against_metric: power_1, better: higher,
    method: my_lab.bound, against: my_lab.bound}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    write_my_lab(tmp_path, bound=BOUND, pictures=PICTURES)
    (tmp_path / "params.yaml").write_text(CALCULATED)
    stages = build_stage_entries(["calculate", "compare"])
    (tmp_path / "dvc.yaml").write_text(study_dvc_yaml_texts(stages, {})["dvc.yaml"])
    yield tmp_path
    forget_package()


def test_its_values_reach_the_page_and_answer_a_question(folder):
    check_study(also=unanswerable_claims)
    write_all_hashes("params.yaml")
    hashed = read_json(folder / "artifacts/code/measure/my_lab.bound.json")
    assert "my_lab/bound.py" in hashed and "my_lab/pictures.py" not in hashed
    assert "my_lab/pictures.py" in read_json(folder / "artifacts/code/stages/compare.json")
    assert (folder / "artifacts/code/settings/my_lab.bound.json").is_file()
    calculate("my_lab.bound")
    assert (folder / "artifacts/history/my_lab.bound/history.jsonl").is_file()
    compare()
    compared = read_json(folder / "artifacts/compare.json")
    means = {name: cell["mean"] for name, cell in compared["calculations"]["my_lab.bound"].items()}
    assert means == pytest.approx({"power_1": 3, "power_2": 29 / 3, "largest": 16})
    (answer,) = compared["questions"].values()
    # n² − n = 2, 6, 12
    assert answer["difference"]["mean"] == pytest.approx(20 / 3)
    assert answer["difference"]["items"] == 3
    page = (folder / "reports/index.html").read_text(encoding="utf-8")
    assert 'id="my_lab_bound"' in page and "Largest power" in page and "Powers" in page
    assert (folder / "reports/plots/my_lab.bound_a_curve.svg").is_file()


def test_it_keeps_its_promises(folder):
    check_without_data(load_yaml_document("params.yaml"), ("calculate", "compare"))
    check_calculation(config.find_class(Measurement, "my_lab.bound"))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("calculations: [my_lab.bound]", "calculations: [my_lab.brightness]", "has no settings"),
        ("calculations:", "measurements:", "found my_lab.bound; allowed: in run.calculations"),
        ("[my_lab.bound]", "[bound]", "found 'bound'; allowed: package.module of a listed"),
        ("power_2", "power_3", "found 'power_3', did you mean 'power_2'?; allowed in my_lab.bound"),
        ("against: my_lab.bound", "against: other", "found 'other'"),
        ("questions:", "sizes: {}\nquestions:", "4:1: sizes: unknown key; allowed: "),
    ],
)
def test_what_is_wrong_is_named(folder, old, new, line):
    (folder / "params.yaml").write_text(CALCULATED.replace(old, new, 1))
    with pytest.raises(UserError, match=line.replace("[", r"\[").replace("?", r"\?")):
        check_study(also=unanswerable_claims)


def test_a_calculation_needs_its_stage(folder):
    with pytest.raises(UserError, match="run.calculations: found a list, but dvc.yaml has no sta"):
        check_without_data(
            parse_yaml_document(CALCULATED, str(folder / "params.yaml")), ("compare",)
        )
