"""The report of a study whose answers are ages."""

import csv
import json
import re

import pytest

from moecore.files import StageError
from moecore.report.claims import Claim, flat_claims, judge
from moecore.report.curves import robustness_csv, robustness_rows, table_s1_csv, training_csv
from moecore.report.page import page
from moecore.report.parts_ages import checks, table_s1
from moecore.report.results import read_results
from moecore.report.summary import rows
from moecore.report.tables import data_facts, flat, table, ways
from moecore.selection import Selection
from tests.report.ages import STAGES, write_ages
from tests.report.test_report import assert_self_contained

METHODS = {"dense": False, "vmoe": True, "ermoe_ba": True}


def results(root, seeds=(0, 1, 2), simulated=True, methods=METHODS, settings="run: {}\n"):
    write_ages(root, methods, list(seeds), simulated)
    return read_results(Selection(methods=tuple(methods), seeds=tuple(seeds), phases=("pretrain",)), settings, root, STAGES)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return results(tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def text(three):
    return page(three)


def test_the_page_says_simulated_first(text, tmp_path):
    assert_self_contained(text)
    body = text[text.index("<main>") :]
    assert body.startswith('<main><p class="simulated"><b>SIMULATED DATA</b> (Small cohort)') and "accuracy" not in body[: body.index("<nav>")]
    real = page(results(tmp_path, [0], simulated=False, methods={"dense": False}))
    assert 'class="simulated"' not in real and "SIMULATED" not in real and "simulated data" not in real and "scans of people" in real


def test_the_page_has_all_parts(text):
    for words in ("Predicted age", "Which expert answers for which tissue", "random, as csf", "MAE, worst case", "Simulated subjects, aged", "Validation MAE",
                  "10.00 years", "ERMoE-ba", "Ages in training", "64 × 64 × 64 voxels", "Error under pgd-10", "White matter alone",
                  "White matter alone, probe", "Rescan, years apart", "Probe: a linear probe"):  # fmt: skip
        assert words in text, words
    for words in ("Confusion", "Reliability", "Test accuracy", "ECE, calibrated", "recal", "control)"):
        assert words not in text, words
    assert text.count("(simulated data)") >= 3 * 3


def test_numbers_of_compare_json(three):
    # Test MAE of method 2 over seeds 0, 1, 2: 6.0, 6.1, 6.2. Mean 6.1, standard deviation 0.1; t(2; 0.975) = 4.3027: ± 4.3027 · 0.1 / √3 = 0.2484.
    found = flat(three)["ermoe_ba"]["pretrain"]
    assert found["test_mae"]["mean"] == pytest.approx(6.1) and found["test_mae"]["high"] - 6.1 == pytest.approx(0.2484, abs=1e-4)
    expected = {
        "median_mae": 10.0, "mae_of_median": 0.61, "mae_pooled": 5.6, "mae_sex_specific": 5.7, "corr_raw": -0.6, "slope_pooled": 0.95, "isolated_csf": 7.1,
        "probe_wm": 6.7, "probe_gm": 6.2, "probe_csf": 4.45, "gm_over_csf": 1.75, "wm_over_gm": 0.5,
        "own_expert": 0.75, "own_expert_random": 0.25, "own_expert_gain": 0.5, "monotone": 0.75, "ageing_rank": 0.95, "rescan": 0.5,
        "attacked_mae_pgd-10": 8.0, "attacked_mae_worst_case": 8.5, "routing_change_fgsm": 0.2, "interval_radius": 7.0, "interval_coverage": 0.9,
    }  # fmt: skip
    assert {name: found[name]["mean"] for name in expected} == pytest.approx(expected)
    assert "own_expert" not in flat(three)["dense"]["pretrain"] and "test_accuracy" not in found and "ece_after" not in found
    assert data_facts(three) == {"data": {"pretrain": {"name": "Small cohort", "simulated": True, "target": "age", "unit": "years"}}}


def test_lower_errors_are_better(three):
    # The first method's MAE is 1 and 2 below the others' in every seed: a paired difference without spread.
    found = flat(three)["dense"]["pretrain"]["test_mae"]["against"]["vmoe"]
    assert found["difference"] == pytest.approx(-1) and found["test"] == "paired t"
    assert {method: row["test_mae"].marked for method, row in table(three, "pretrain")[1].items()} == {"dense": True, "vmoe": False, "ermoe_ba": False}


def test_a_control_is_never_the_best(tmp_path):
    # The first method has the smallest errors by 1 and 2 years. As a control it has no mark, and the next one has it; told once that it is one.
    methods, settings = {"shuffled": True, "vmoe": True, "dense": False}, "methods:\n  shuffled: {permuted: true}\n  vmoe: {permuted: false}\n  dense:\n"
    found, plain = results(tmp_path / "control", methods=methods, settings=settings), results(tmp_path / "plain", methods=methods)
    assert found.controls == {"shuffled"} and plain.controls == frozenset()
    for name in ("test_mae", "attacked_mae_worst_case"):
        assert [[row[name].marked for row in table(one, "pretrain")[1].values()] for one in (found, plain)] == [[False, True, False], [True, False, False]]
    text, label = page(found), '<th scope="row">shuffled<span class="note">control</span>'
    assert text.count(label) == 1 and "Marks leave out shuffled (control)" in text and label not in page(plain) and "Marks leave out" not in page(plain)
    assert flat(found) == flat(plain), "it stays in the table"


def test_one_method_beside_a_control_has_no_mark(tmp_path):
    methods, settings = {"shuffled": False, "vmoe": True}, "methods: {shuffled: {permuted: true}, vmoe: {}}"
    for seeds in ((0,), (0, 1, 2)):
        found = results(tmp_path / str(len(seeds)), seeds, methods=methods, settings=settings)
        metrics, cells = table(found, "pretrain")
        assert not any(cell.marked for row in cells.values() for cell in row.values() if cell) and ways(found, "pretrain", metrics) == set()


def test_tissues_alone(tmp_path):
    one = results(tmp_path, [0], methods={"dense": False}).models["pretrain"]
    text = checks(one, "pretrain")
    heads, cells = (re.findall(pattern, text) for pattern in (r"<th>(.*?)</th>", r"<td>([-\d.]+)"))
    assert dict(zip(heads[1:], map(float, cells), strict=True)) == {
        "Whole volume": 4.0, "White matter alone": 9.0, "Grey matter alone": 8.0, "CSF alone": 7.0,
        "Whole volume, probe": 2.75, "White matter alone, probe": 6.5, "Grey matter alone, probe": 6.0, "CSF alone, probe": 4.25,
        "GM − CSF, probe": 1.75, "WM − GM, probe": 0.5, "Rescan, years apart": 0.5,
    }  # fmt: skip
    without = one["dense"][0]
    left = without.cohort_checks | {"order": None, "isolated": None}
    bare = checks({"dense": {0: without._replace(cohort_checks=left)}}, "pretrain")
    assert "Whole volume, probe" in bare and "GM − CSF" not in bare and "White matter" not in bare


def test_claims_over_errors(three):
    claims = [
        Claim(paper="ERMoE", says="a", metric="test_mae", method="dense", against="vmoe", better="lower"),
        Claim(paper="ERMoE", says="b", metric="mae_pooled", method="ermoe_ba", against="dense", better="lower"),
    ]
    holds, contradicted = judge(claims, three)
    assert (holds.verdict, contradicted.verdict) == ("holds", "contradicted") and contradicted.difference.value == pytest.approx(2)
    assert json.dumps(flat_claims([holds]), allow_nan=False)
    with pytest.raises(StageError, match="dense has no own_expert; allowed: vmoe, ermoe_ba"):
        judge([Claim(paper="x", says="x", metric="own_expert", method="dense", against="vmoe", better="higher")], three)


def test_table_s1_over_seeds(three, tmp_path):
    text = table_s1(three.models["pretrain"])
    # ermoe_ba pooled: 5.5, 5.6, 5.7
    assert text.count("<tr>") == 1 + 3 * 3 and "5.600" in text and "5.352 – 5.848" in text
    assert "4.000" in (one := table_s1(results(tmp_path, [0], methods={"dense": False}).models["pretrain"])) and "3.500 – 4.500" in one


def test_one_seed_has_the_bootstraps_limits(tmp_path):
    found = results(tmp_path, [0])
    cells = flat(found)["vmoe"]["pretrain"]
    assert cells["test_mae"] == {"mean": 5.0, "low": 4.5, "high": 5.5, "interval": "bootstrap", "seeds": 1}
    limits = {"probe_wm": (6.5, 6.0, 6.75), "probe_csf": (4.25, 3.75, 4.5), "gm_over_csf": (1.75, 1.5, 2.25), "wm_over_gm": (0.5, -0.25, 1.0)}
    assert {name: tuple(cells[name][key] for key in ("mean", "low", "high")) for name in limits} == limits
    assert robustness_rows([found.models["pretrain"]["dense"][0]], "pgd-10", "mae")[-1] == {"epsilon": 2 / 255, "value": 6.0, "low": 5.0, "high": 7.0}


def test_csv_files(three):
    training, robustness, s1 = (list(csv.DictReader(text.splitlines())) for text in (training_csv(three), robustness_csv(three), table_s1_csv(three)))
    assert len(training) == 27 and set(training[0]) == {"phase", "method", "seed", "step", "epoch", "train_loss", "train_mae", "validation_mae"}
    assert len(robustness) == 9 * 2 * 3 and robustness[2]["mae"] == "6.0" and robustness[2]["low"] == "5.0" and "accuracy" not in robustness[0]
    assert len(s1) == 27 and s1[0]["prediction"] == "raw" and s1[0]["corr"] == "-0.6" and float(s1[1]["mae_high"]) == 4.0


def test_the_summary_in_the_terminal(three):
    found = rows(flat(three) | data_facts(three))
    assert [row["method"] for row in found] == list(METHODS) and found[2]["test_mae"].startswith("6.100 [") and found[0]["own_expert_gain"] == "–"
    assert found[0]["monotone"].startswith("75.00%") and "test_accuracy" not in found[0] and "attacked_mae_worst_case" in found[0]
    assert found[0]["isolated_gm"].startswith("8.100 [") and [found[0][f"probe_{name}"][:5] for name in ("wm", "gm", "csf")] == ["6.700", "6.200", "4.450"]


def test_a_refused_correction_is_told(tmp_path):
    write_ages(tmp_path, METHODS, [0])
    path = tmp_path / "artifacts/measured/calibrate/pretrain/vmoe/0.json"
    stored = json.loads(path.read_text())
    stored |= {"pooled": None, "sex_specific": None, "refused": "found a slope of 0.01"}
    stored["points"]["pooled"] = None
    path.write_text(json.dumps(stored))
    found = read_results(Selection(methods=tuple(METHODS), seeds=(0,), phases=("pretrain",)), "", tmp_path, STAGES)
    assert "mae_pooled" not in flat(found)["vmoe"]["pretrain"] and "mae_pooled" in flat(found)["dense"]["pretrain"]
    assert "Not corrected: vmoe, seed 0. found a slope of 0.01" in page(found)


def test_a_missing_key_is_named(tmp_path):
    write_ages(tmp_path, {"dense": False}, [0])
    path = tmp_path / "artifacts/measured/pretrain/dense/0.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "test_mae"}))
    with pytest.raises(StageError, match="lacks test_mae"):
        read_results(Selection(methods=("dense",), seeds=(0,), phases=("pretrain",)), "", tmp_path, STAGES)
