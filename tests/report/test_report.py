import csv
import json
import re

import pytest
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.measure.cost import Result as Cost
from moecore.measure.robustness import Result as Robustness
from moecore.report.cells import Cell
from moecore.report.column import Column, Metric
from moecore.report.curves import robustness_csv, training_csv
from moecore.report.page import page
from moecore.report.results import USUAL, read_results
from moecore.report.tables import apart, flat, table
from moecore.report.words import between, shown
from moecore.statistics.intervals import Interval
from moecore.study.selection import Selection
from moecore.training.outcome import Outcome
from tests.report.generated import write_results

MISSING = [
    "artifacts/measured/finetune/tgr/0.json",
    "artifacts/measured/robustness/pretrain/dense/0.json",
    "artifacts/data/finetune/card.json",
]
METHODS = {"dense": False, "vmoe": True, "tgr": True}


def results(root, methods=METHODS, seeds=(0,), phases=("pretrain", "finetune")):
    write_results(root, methods, list(seeds), list(phases))
    return read_results(
        Selection(methods=tuple(methods), seeds=tuple(seeds), phases=tuple(phases)),
        "run: {} # <settings> & more\n",
        root,
    )


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    return results(tmp_path_factory.mktemp("one"))


def assert_self_contained(text: str) -> None:
    assert not re.search(r"""(src|href|url|@import)\s*[=(]?\s*["']?\s*(https?:)?//""", text)
    assert "<script" not in text and "<link" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_page_is_self_contained_and_complete(one_seed):
    text = page(one_seed)
    assert_self_contained(text)
    assert (
        'name="viewport"' in text
        and "prefers-color-scheme: dark" in text
        and "&lt;settings&gt; &amp; more" in text
    )
    assert text.index("<table") < text.index("<svg")
    assert (
        all(method in text for method in METHODS)
        and "Agreement with teacher" in text
        and "Agreement before / after" in text
    )
    assert page(one_seed) == text


def test_dense_alone_and_several_seeds(tmp_path):
    dense = page(results(tmp_path / "dense", {"dense": False}, phases=["pretrain"]))
    assert_self_contained(dense)
    assert "Which expert" not in dense and "Load CV²" not in dense and "Routing change" not in dense
    many = page(results(tmp_path / "many", seeds=[0, 1, 2], phases=["finetune"]))
    assert_self_contained(many)
    assert "Student" in many and "Wilson" not in many


def test_intervals_of_the_table(one_seed, tmp_path):
    found = flat(one_seed)["vmoe"]["pretrain"]
    assert (
        found["test_accuracy"]["interval"] == "wilson"
        and found["ece_after"]["interval"] == "bootstrap"
    )
    assert "low" not in found["load_cv2"] and found["parameters"] == {"mean": 1_240_000, "seeds": 1}
    assert "load_cv2" not in flat(one_seed)["dense"]["pretrain"]
    many = flat(results(tmp_path, seeds=[0, 1]))["tgr"]["finetune"]
    assert (
        many["test_accuracy"]["interval"] == "t"
        and many["test_accuracy"]["seeds"] == 2
        and many["load_cv2"]["interval"] == "t"
    )
    json.dumps(many, allow_nan=False)


def test_columns_without_any_value_are_left_out(one_seed):
    found = table(one_seed, one_seed.phases["pretrain"]).metrics
    assert "agreement_before_after" not in {metric.name for metric in found}


HIGHER = Metric(Column("a", "a", lambda result: None, "higher"), Outcome)
LOWER = Metric(Column("a", "a", lambda result: None, "lower"), Outcome)
NEITHER = Metric(Column("a", "a", lambda result: None), Outcome)


def cells(**limits):
    return {
        name: Cell(Interval((low + high) / 2, low, high), "t", 2)
        for name, (low, high) in limits.items()
    }


def test_the_best_is_marked_only_outside_the_intervals():
    away = cells(a=(0.1, 0.2), b=(0.3, 0.4), c=(0.41, 0.5))
    touching = cells(a=(0.1, 0.2), b=(0.3, 0.42), c=(0.41, 0.5))
    assert apart(HIGHER, away) == "c"
    assert apart(LOWER, away) == "a"
    assert apart(HIGHER, touching) is None
    assert apart(LOWER, touching) == "a"
    assert apart(NEITHER, away) is None
    assert apart(HIGHER, cells(a=(0, 1))) is None
    assert apart(HIGHER, {**away, "d": Cell(Interval(0.0), "", 1)}) is None


@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_file_is_named(tmp_path, missing):
    write_results(tmp_path, METHODS, [0], ["pretrain", "finetune"])
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=re.escape(missing)):
        read_results(Selection(methods=tuple(METHODS), seeds=(0,)), "", tmp_path)


@pytest.mark.parametrize(
    ("what", "stage"), [("pretrain", "pretrain"), ("robustness/pretrain", "robustness")]
)
def test_a_file_of_other_code_is_refused(tmp_path, what, stage):
    write_results(tmp_path, {"dense": False}, [0], ["pretrain"])
    path = tmp_path / f"artifacts/measured/{what}/dense/0.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"seats": 3}))
    run = Selection(methods=("dense",), seeds=(0,), phases=("pretrain",))
    expected = f"{what}/dense/0.json: written by other code (seats: .*); run `dvc repro {stage}`"
    with pytest.raises(UserError, match=expected.replace("(", r"\(").replace(")", r"\)")):
        read_results(run, "", tmp_path)


def test_what_does_not_apply_is_told(one_seed):
    text = page(one_seed)
    assert "What does not apply to a method" in text
    assert "dense, routing: the model has no MoE layers." in text


def test_methods_left_on_disk_are_not_compared(tmp_path):
    write_results(tmp_path, METHODS, [0], ["pretrain"])
    found = read_results(
        Selection(methods=("vmoe",), seeds=(0,), phases=("pretrain",)), "", tmp_path
    )
    assert list(flat(found)) == ["vmoe"] and ">tgr<" not in page(found)


def test_csv_for_dvc_plots(one_seed):
    curves = list(csv.DictReader(training_csv(one_seed).splitlines()))
    attacks = list(csv.DictReader(robustness_csv(one_seed).splitlines()))
    assert len(curves) == 2 * 3 * 10 and set(curves[0]) >= {
        "phase",
        "method",
        "seed",
        "step",
        "train_loss",
        "validation_accuracy",
    }
    assert len(attacks) == 2 * 3 * 2 * 4 and {row["attack"] for row in attacks} == {
        "fgsm",
        "pgd-10",
    }


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (0.9123, "share", "91.2 %"),
        (12345, "count", "12,345"),
        (75, "seconds", "1 min 15 s"),
        (3725, "seconds", "1 h 02 min"),
        (9, "seconds", "9 s"),
        (0.0712, "number", "0.071"),
        (0.00001, "number", "1.00e-05"),
        (0, "number", "0.000"),
        (12934.6, "number", "12,935"),
        (2.5e6, "number", "2.50e+06"),
    ],
)
def test_numbers_for_readers(value, form, expected):
    assert shown(value, form) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((0.00002, 0.009), "0.000 – 0.009"),
        ((0.00002, 0.00003), "2.00e-05 – 3.00e-05"),
        ((43.85, 3505.2), "43.850 – 3,505"),
    ],
)
def test_a_limit_that_is_tiny_beside_the_other_is_printed_as_zero(limits, expected):
    assert between(*limits, "number") == expected


def test_a_phase_that_is_not_thorough_has_the_usual_stages_only(tmp_path):
    stages = [*USUAL, "cost"]
    write_results(tmp_path, METHODS, [0], ["pretrain"], stages)
    write_results(tmp_path, METHODS, [0], ["finetune"], USUAL)
    run = Selection(
        methods=tuple(METHODS),
        seeds=(0,),
        phases=("pretrain", "finetune"),
        measurements=("cost",),
        thorough=("pretrain",),
    )
    found = read_results(run, "", tmp_path, stages)
    assert len(found.phases["pretrain"].results(Cost)) == len(METHODS)
    assert found.phases["finetune"].results(Cost) == []
    assert found.phases["finetune"].results(Robustness)
    assert page(found).count("Latency") > 0
    with pytest.raises(UserError, match="cost/finetune"):
        read_results(run.model_copy(update={"thorough": None}), "", tmp_path, stages)


def test_thorough_phases_are_among_the_phases():
    with pytest.raises(
        ValidationError,
        match="thorough names adversarial; allowed: pretrain, finetune, as in phases",
    ):
        Selection(methods=("dense",), seeds=(0,), thorough=("adversarial",))
