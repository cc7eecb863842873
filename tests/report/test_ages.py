import csv
import json

import pytest

from moecore.measure import CohortChecks, Robustness
from moecore.report import report_files, results_and_displays
from moecore.report.figures.charts import attack_points
from moecore.report.page.report_page import render_report
from moecore.report.pictures import calibration_and_cohorts
from moecore.report.pictures.robustness import scores_by_epsilon
from moecore.report.tables.cells import NumberFormat
from moecore.report.tables.metrics_by_method import build_table, compare_methods, used_tests
from moecore.report.tables.terminal_summary import headline_rows
from moecore.study.run_and_claims import RunSelection
from tests.report.ages import STAGES, write_ages
from tests.report.test_report import assert_self_contained

pytestmark = pytest.mark.usefixtures("undrawn")
METHODS = {"dense": False, "vmoe": True, "ermoe_ba": True}


def results(root, seeds=(0, 1, 2), simulated=True, methods=METHODS, settings="run: {}\n"):
    write_ages(root, methods, list(seeds), simulated)
    return read(root, methods, seeds, settings)


def read(root, methods, seeds, settings):
    run = RunSelection(methods=tuple(methods), seeds=tuple(seeds), phases=("pretrain",))
    return results_and_displays.read_results(run, settings, root, STAGES)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return results(tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def text(three):
    return render_report(three)


def test_the_page_says_simulated_first(text, tmp_path):
    assert_self_contained(text)
    body = text[text.index("<main>") :]
    assert body.startswith('<main>\n<p class="simulated"><b>SIMULATED DATA</b> (Small cohort)')
    assert "accuracy" not in body[: body.index("<script>")]
    real = render_report(results(tmp_path, [0], simulated=False, methods={"dense": False}))
    assert 'class="simulated"' not in real and "SIMULATED" not in real
    assert "simulated data" not in real and "scans of people" in real


def test_numbers_of_compare_json(three):
    # Test MAE of method 2 over seeds 0, 1, 2: 6.0, 6.1, 6.2. Mean 6.1, standard deviation 0.1;
    # t(2; 0.975) = 4.3027: ± 4.3027 · 0.1 / √3 = 0.2484.
    compared = compare_methods(three)
    found, dense = (compared[method]["pretrain"] for method in ("ermoe_ba", "dense"))
    assert found["test_mae"]["mean"] == pytest.approx(6.1)
    assert found["test_mae"]["high"] - 6.1 == pytest.approx(0.2484, abs=1e-4)
    expected = {"median_mae": 10.0, "mae_of_median": 0.61, "mae_pooled": 5.6, "monotone": 0.75}
    expected |= {"mae_sex_specific": 5.7, "corr_raw": -0.6, "corr_size_raw": 0.6, "rescan": 0.5}
    expected |= {"slope_pooled": 0.95, "interval_radius": 7.0, "interval_coverage": 0.9}
    expected |= {"isolated_csf": 7.1, "probe_wm": 6.7, "probe_gm": 6.2, "probe_csf": 4.45}
    expected |= {"gm_over_csf": 1.75, "wm_over_gm": 0.5, "ageing_rank": 0.95}
    expected |= {"own_expert": 0.75, "own_expert_random": 0.25, "own_expert_gain": 0.5}
    expected |= {"mixed_agreement": 0.71, "mixed_over_chance": 0.335, "whole_agreement": 0.6}
    expected |= {"whole_over_chance": 0.225, "other_generator_agreement": 0.5}
    expected |= {"other_generator_over_chance": 0.125, "routing_change_fgsm": 0.2}
    expected |= {"attacked_mae_pgd-10": 8.0, "attacked_mae_worst_case": 8.5}
    assert {name: found[name]["mean"] for name in expected} == pytest.approx(expected)
    assert "own_expert" not in dense and "mixed_agreement" not in dense
    assert "test_accuracy" not in found and "ece_after" not in found
    facts = {"name": "Small cohort", "simulated": True, "target": "age", "unit": "years"}
    assert compared["data"]["pretrain"] == facts
    # The first method's MAE is 1 and 2 below the others' in every seed: a paired difference
    # without spread.
    tested = dense["test_mae"]["against"]["vmoe"]
    assert tested["difference"] == pytest.approx(-1) and tested["test"] == "seeds"
    assert marked(three, "test_mae") == [True, False, False]


def marked(found, name):
    cells = build_table(found, found.phases["pretrain"]).cells
    return [row[name].marked for row in cells.values()]


def test_a_control_is_never_the_best(tmp_path):
    # The first method has the smallest errors by 1 and 2 years. As a control it has no mark, and
    # the next one has it; told once that it is one.
    methods = {"shuffled": True, "vmoe": True, "dense": False}
    settings = "methods:\n  shuffled: {permuted: true}\n  vmoe: {permuted: false}\n  dense:\n"
    found = results(tmp_path / "control", methods=methods, settings=settings)
    plain = results(tmp_path / "plain", methods=methods)
    assert found.controls == {"shuffled"} and plain.controls == frozenset()
    for name in ("test_mae", "attacked_mae_worst_case"):
        assert marked(found, name) == [False, True, False]
        assert marked(plain, name) == [True, False, False]
    text, label = render_report(found), '<th scope="row">shuffled<span class="note">control</span>'
    assert text.count(label) == 3, "the headline, and a table a paper"
    assert "Not compared: shuffled (control, trained" in text
    assert "Not shown: shuffled (control)." in text
    assert label not in render_report(plain) and "Not compared" not in render_report(plain)
    assert compare_methods(found) == compare_methods(plain), "it stays in the table"


def test_one_method_beside_a_control_has_no_mark(tmp_path):
    methods = {"shuffled": False, "vmoe": True}
    settings = "methods: {shuffled: {permuted: true}, vmoe: {}}"
    for seeds in ((0,), (0, 1, 2)):
        found = results(tmp_path / str(len(seeds)), seeds, methods=methods, settings=settings)
        phase = found.phases["pretrain"]
        table = build_table(found, phase)
        assert not any(cell.marked for row in table.cells.values() for cell in row.values() if cell)
        assert used_tests(found, phase, table) == set()


def test_tissues_alone(tmp_path):
    phase = results(tmp_path, [0], methods={"dense": False}).phases["pretrain"]
    grid = calibration_and_cohorts.tissue_error_table(phase)
    values = [float(item.text) for item in grid.lines[0].items]
    assert grid.columns[1:] == list(calibration_and_cohorts.ERRORS)
    assert values == [4.0, 9.0, 8.0, 7.0, 2.75, 6.5, 6.0, 4.25, 1.75, 0.5, 0.5]
    model = phase.models["dense"][0]
    found = model.of(CohortChecks)
    kept = [value for value in found.values if value.metric.startswith(("whole", "rescan"))]
    left = found.model_copy(update={"values": tuple(kept)})
    model = model._replace(results={**model.results, CohortChecks: left})
    bare = calibration_and_cohorts.tissue_error_table(phase._replace(models={"dense": {0: model}}))
    assert "Whole volume, probe" in bare.columns
    assert not [name for name in bare.columns if "GM" in name or "White" in name]


def test_region_experts_where_they_were_not_taught(three, text):
    grid = calibration_and_cohorts.region_expert_agreement_table(three.phases["pretrain"])
    heads = [line.head.text for line in grid.lines]
    assert [head for head in heads if head in METHODS] == ["vmoe", "ermoe_ba"], "dense has none"
    rows = {line.head.text: [item.text for item in line.items] for line in grid.lines[1:6]}
    assert rows["Isolated, as taught"][0].startswith("90")
    percent = NumberFormat("share", 1).value
    assert rows["Two tissues mixed"][:2] == [percent(0.71), percent(0.375)]
    assert rows["Other generator, whole"][2].startswith("0.1") and "no finding" in grid.below
    assert "Region experts where they were not taught" in text
    assert "Not checked, generalisation" not in text
    (first, *_) = three.phases["pretrain"].of(CohortChecks)["vmoe"]
    mixed = calibration_and_cohorts.mixture_agreement_table(first, "vmoe")
    assert [line.head.text for line in mixed.lines] == ["WM with GM"]
    assert [item.text for item in mixed.lines[0].items] == [NumberFormat("share", 0).value(0.7)]
    assert mixed.below.endswith("other generator: WM 0.50, GM 0.50, CSF 0.50.")
    phase = three.phases["pretrain"]
    alone = phase._replace(models={"dense": phase.models["dense"]})
    assert calibration_and_cohorts.region_expert_agreement_table(alone) is None


def test_table_s1_over_seeds(three, tmp_path):
    grid = calibration_and_cohorts.age_errors_table(three.phases["pretrain"])
    assert len(grid.lines) == 3 * 3
    # ermoe_ba pooled: 5.5, 5.6, 5.7
    assert grid.lines[7].items[0][:2] == ("5.60", "5.35 – 5.85")
    one = calibration_and_cohorts.age_errors_table(
        results(tmp_path, [0], methods={"dense": False}).phases["pretrain"]
    )
    assert one.lines[0].items[0][:2] == ("4.00", "3.50 – 4.50")


def test_one_seed_has_the_bootstraps_limits(tmp_path):
    found = results(tmp_path, [0])
    cells = compare_methods(found)["vmoe"]["pretrain"]
    limits = {"mean": 5.0, "low": 4.5, "high": 5.5, "interval": "bootstrap"}
    assert cells["test_mae"] == limits | {"seeds": 1, "form": "number"}
    limits = (
        {"probe_wm": (6.5, 6.0, 6.75), "probe_csf": (4.25, 3.75, 4.5)}
        | {"gm_over_csf": (1.75, 1.5, 2.25), "wm_over_gm": (0.5, -0.25, 1.0)}
        | {"mixed_agreement": (0.7, 0.6375, 0.7625), "whole_over_chance": (0.225, 0.1, 0.35)}
    )
    for name, expected in limits.items():
        found_limits = tuple(cells[name][key] for key in ("mean", "low", "high"))
        assert found_limits == pytest.approx(expected), name
    phase = found.phases["pretrain"]
    values = scores_by_epsilon(phase.models["dense"][0].of(Robustness), "pgd-10")
    assert attack_points([values], phase.task.score)[-1] == pytest.approx((2.0, 6.0, 5.0, 7.0))


def test_csv_files(three):
    training = list(csv.DictReader(report_files.training_csv(three).splitlines()))
    robustness = list(csv.DictReader(report_files.robustness_csv(three).splitlines()))
    s1 = list(csv.DictReader(report_files.age_errors_by_model_csv(three).splitlines()))
    assert len(training) == 27 and {"train_mae", "validation_mae"} < set(training[0])
    assert len(robustness) == 9 * 2 * 3 and robustness[2]["mae"] == "6.0"
    assert robustness[2]["low"] == "5.0" and "accuracy" not in robustness[0]
    assert len(s1) == 27 and s1[0]["prediction"] == "raw" and s1[0]["corr"] == "-0.6"
    assert float(s1[1]["mae_high"]) == 4.0


def test_the_summary_in_the_terminal(three):
    found = headline_rows(compare_methods(three))
    assert [row["method"] for row in found] == list(METHODS)
    assert found[2]["test_mae"] == "6.10 [5.85 – 6.35]" and found[0]["own_expert_gain"] == "–"
    assert found[0]["monotone"].startswith("75.0 %") and "test_accuracy" not in found[0]
    assert "attacked_mae_worst_case" in found[0] and found[0]["isolated_gm"].startswith("8.10 [")
    probes = [found[0][f"probe_{name}"][:4] for name in ("wm", "gm", "csf")]
    assert probes == ["6.70", "6.20", "4.45"]


def test_a_refused_correction_is_told(tmp_path):
    write_ages(tmp_path, METHODS, [0])
    path = tmp_path / "artifacts/measured/calibrate/pretrain/vmoe/0.json"
    stored = json.loads(path.read_text())
    corrected = ("pooled", "sex_specific")
    kept = [value for value in stored["values"] if not value["metric"].endswith(corrected)]
    stored["values"] = kept
    stored["facts"]["refused"] = "found a slope of 0.01"
    stored["facts"]["points"]["pooled"] = None
    path.write_text(json.dumps(stored))
    found = read(tmp_path, METHODS, [0], "")
    assert "mae_pooled" not in compare_methods(found)["vmoe"]["pretrain"]
    assert "mae_pooled" in compare_methods(found)["dense"]["pretrain"]
    assert "Not corrected: vmoe, seed 0. found a slope of 0.01" in render_report(found)
