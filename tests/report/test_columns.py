import numpy as np
import pytest

from moecore.measure import Robustness, Routing
from moecore.measure.corruptions import Corruptions, errors_of, mean_dense_errors, relative_mce
from moecore.measure.robustness import METRICS
from moecore.measure.training import collect_outcome_values
from moecore.measure.values import Found, Value, Values
from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.column import build_column_context
from moecore.report.figures.charts import points_over_seeds
from moecore.report.page.report_page import render_report
from moecore.report.pictures import robustness
from moecore.report.tables.metrics_by_method import build_table, compare_methods
from moecore.statistics.intervals import Interval
from moecore.study.run_and_claims import Question
from moecore.study.stages import MEASURED_STAGES
from moecore.tasks.multi_label import MultiLabel
from tests.report.generated import CLASSES, NEW, TASK, changed
from tests.report.test_metrics import study
from tests.report.test_report import METHODS, assert_self_contained

pytestmark = pytest.mark.usefixtures("undrawn")
EVERY = (*MEASURED_STAGES, "invariance", *NEW)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return study(tmp_path_factory.mktemp("columns"), stages=EVERY)


@pytest.fixture(scope="module")
def text(whole):
    return render_report(whole)


def cells(found, method):
    row = build_table(found, found.phases["pretrain"]).cells[method]
    return {name: cell.interval for name, cell in row.items() if cell}


def test_mce_is_relative_to_the_mean_of_dense_over_its_seeds(tmp_path, whole):
    """vmoe: noise (0.3, 0.5), blur (0.1, 0.3); dense: noise (0.2, 0.4), blur (0.1, 0.3)."""
    assert cells(whole, "vmoe")["mce"].value == pytest.approx((0.8 / 0.6 + 0.4 / 0.4) / 2)
    assert cells(whole, "dense")["mce"].value == pytest.approx(1)
    found = study(tmp_path, seeds=(0, 1), stages=("corruptions",))
    errors = mean_dense_errors(build_column_context(found.phases["pretrain"], Corruptions).of_dense)
    assert errors["noise"] == pytest.approx({1: 0.205, 5: 0.405})
    assert errors["blur"] == pytest.approx({1: 0.1, 5: 0.3})
    # dense, seed 0: 0.6 / 0.61, seed 1: 0.62 / 0.61; blur 1
    mce = ((0.6 / 0.61 + 1) / 2 + (0.62 / 0.61 + 1) / 2) / 2
    assert cells(found, "dense")["mce"].value == pytest.approx(mce)


def test_without_dense_or_without_its_errors_there_is_no_mce(tmp_path, whole):
    assert "mce" not in cells(study(tmp_path, stages=EVERY, methods={"vmoe": True}), "vmoe")
    dense = whole.phases["pretrain"].first(Corruptions)["dense"]
    values = [
        value.model_copy(update={"value": 0.0 if value.at.get("corruption") == "blur" else 1.0})
        for value in dense.values
    ]
    perfect = Found(values=values)
    assert errors_of(perfect)["blur"] == {1: 0.0, 5: 0.0}
    assert mean_dense_errors([perfect]) is relative_mce(dense, [perfect]) is None


def test_timings_have_quartiles_and_trainings_are_relative_to_the_baseline(whole):
    cell = build_table(whole, whole.phases["pretrain"]).cells["vmoe"]["latency_ms"]
    assert (cell.interval, cell.kind) == ((4.0, 3.5, 4.75), "quartiles")
    overheads = [cells(whole, method)["training_overhead"].value for method in METHODS]
    assert overheads == pytest.approx([0.8, 1.0, 1.2]), "trainings of 120, 150, 180 s"


def worst_of(*hits: list[int]) -> Found:
    """Which of four images are right at ε = 0, then at each larger ε."""
    out = Values(METRICS, TASK, lambda name, compute: compute())
    for place, right in enumerate(hits):
        out.put("worst", np.array(right), epsilon=0.1 * place)
    return out.found()


def test_a_gain_at_equal_clean_accuracy_is_over_images_that_both_have_right():
    # Both right: images 0 and 1 of the first seed (1 and 0 more under attack, then 0 and −1); image
    # 2 alone of the second (0, then 1). The mean over seeds of 1/2 and 0, then of −1/2 and 1.
    ours = [worst_of([1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0])]
    theirs = [worst_of([1, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 0])]
    found = robustness.gains_where_both_right(ours, theirs)
    assert [gain.value for gain in found] == pytest.approx([0.5, -0.5])
    assert found[0].low < 0.5 < found[0].high
    ours += [worst_of([0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0])]
    theirs += [worst_of([0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0])]
    found = robustness.gains_where_both_right(ours, theirs)
    assert [gain.value for gain in found] == pytest.approx([0.25, 0.25])
    none = worst_of([0, 0, 0, 0], [0, 0, 0, 0])
    assert robustness.gains_where_both_right([none], [none]) == [None]


def test_each_epsilon_is_shown_with_the_standard_accuracy(whole):
    (grid,) = robustness.robust_accuracy_block(whole.phases["pretrain"]).grids
    assert grid.columns[:2] == ["Attack", "Standard"] and grid.columns[-1] == "ε = 8/255"
    shown = [line.head.text for line in grid.lines]
    equal = "worst case − dense, at equal standard accuracy"
    rows = ["Worst case", "FGSM", "PGD 10"]
    assert shown == ["dense", *rows, "vmoe", *rows, equal, "tgr", *rows, equal]
    assert {len(line.items) for line in grid.lines} == {0, len(grid.columns) - 1}


def test_an_attack_with_a_radius_of_its_own_has_the_last_column(whole, monkeypatch):
    at = [{"attack": "fab-0.5-l2", "epsilon": epsilon} for epsilon in (0.0, 0.5)]
    more = {"attacked": [Value(metric="attacked", at=p, value=0.9 - p["epsilon"]) for p in at]}
    every = Found.all
    monkeypatch.setattr(Found, "all", lambda self, key: every(self, key) + more.get(key, []))
    (grid,) = robustness.robust_accuracy_block(whole.phases["pretrain"]).grids
    assert grid.columns[-2:] == ["ε = 8/255", "own ε"]
    texts = {line.head.text: [cell.text for cell in line.items] for line in grid.lines}
    assert {len(row) for row in texts.values()} == {0, len(grid.columns) - 1}
    texts = texts["FAB 0.5 L2"]
    assert (texts[0], texts[-1]) == ("90.0 %", "40.0 %") and not any(texts[1:-1])


def test_attacks_are_named_as_by_their_authors():
    names = {"apgd-cross_entropy-50": "APGD-CE 50", "apgd-dlr": "APGD-DLR", "pgd-10": "PGD 10"}
    names |= {"autoattack": "AutoAttack", "router_attack-50": "router attack 50"}
    names |= {"pgd-10-strong-2": "PGD 10 strong, 2 starts", "fgsm": "FGSM"}
    assert {name: robustness.attack_title(name) for name in names} == names


def test_worst_case_and_both_changes_of_the_routing(whole):
    found = cells(whole, "vmoe")
    measured = whole.phases["pretrain"].models["vmoe"][0]
    # right under FGSM: images 10 … 10 + r − 1; under PGD: 0 … s − 1; both: 10 … s − 1 (r > s)
    attacked = measured.of(Robustness)
    rows = {name: robustness.scores_by_epsilon(attacked, name) for name in ("fgsm", "pgd-10")}
    fgsm, pgd = (round(200 * values[-1].value) for values in rows.values())
    assert fgsm > pgd > 10 and found["accuracy_worst_case"].value == pytest.approx((pgd - 10) / 200)
    columns = {one.name: one for one in build_table(whole, whole.phases["pretrain"]).metrics}
    hits = columns["accuracy_worst_case"].hits(measured)
    assert hits.nonzero()[0].tolist() == list(range(10, pgd))
    assert columns["accuracy_fgsm"].hits(measured).sum() == fgsm
    left = {value.at["epsilon"]: value.value for value in rows["fgsm"][1:]}
    for epsilon, value in left.items():
        assert found[f"accuracy_fgsm_at_{255 * epsilon:.0f}_255"].value == value
    assert found["accuracy_fgsm_mean"].value == pytest.approx(sum(left.values()) / len(left))
    # 0.5 · (8 / 255) · 255 / 8 at the largest epsilon
    assert found["routing_change_fgsm"].value == pytest.approx(0.5)
    assert found["processing_change_fgsm"].value == pytest.approx(0.25)
    layers = [found[f"routing_change_pgd-10_layer_{number}"].value for number in (1, 2, 3)]
    assert layers == pytest.approx([0.5] * 3) and "routing_change_pgd-10_layer_4" not in found
    assert "routing_change_pgd-10_layer_1" not in cells(whole, "dense")


def test_steps_to_the_final_loss_of_the_baseline_of_the_same_seed(tmp_path):
    # 10 epochs of 50 steps; the loss of method n is 1.9 · 0.8^epoch + 0.02 n, so that dense is
    # where vmoe ends in the last epoch, and tgr never is: an epoch after its end.
    found = study(tmp_path, seeds=(0, 1), stages=())
    assert cells(found, "vmoe")["steps_to_baseline_loss"].value == 500
    assert cells(found, "dense")["steps_to_baseline_loss"].value == 500
    assert cells(found, "tgr")["steps_to_baseline_loss"] == Interval(550)  # of a bound: no limits
    assert cells(found, "dense")["steps_to_baseline_loss"].limits == (500, 500)
    metric = {"metric": "steps_to_baseline_loss", "better": "lower", "asks": "sooner?"}
    (answer,) = evaluate_claims([Question(method="tgr", against="vmoe", **metric)], found)
    assert (answer.verdict, answer.p, answer.difference.value) == ("open", None, 50)
    compared = {name: phases["pretrain"] for name, phases in compare_methods(found).items()}
    assert "against" not in compared["tgr"]["steps_to_baseline_loss"]
    assert compared["dense"]["steps_to_baseline_loss"]["against"]["vmoe"]["p"] == 1
    models = found.phases["pretrain"].models["vmoe"]
    slow = models[1].outcome
    curve = tuple(row | {"train_loss": row["train_loss"] + 0.1} for row in slow.curve)
    models[1] = changed(models[1], slow.model_copy(update={"curve": curve}))
    # 0.304 + 0.02 of seed 1: dense has 0.319 after 8 epochs; seed 0 stays at 500
    assert cells(found, "dense")["steps_to_baseline_loss"].value == (500 + 400) / 2


def test_an_attack_that_a_model_has_nothing_for(tmp_path):
    found = study(tmp_path, stages=("robustness",))
    models = found.phases["pretrain"].models
    result = models["dense"][0].of(Robustness)
    values = [value for value in result.values if value.at.get("attack") == "fgsm"]
    worst = [
        value.model_copy(update={"metric": name, "at": {"epsilon": value.at["epsilon"]}})
        for value in values
        if (name := {"attacked": "worst", "attacked_at": "worst_at"}.get(value.metric))
    ]
    changes = {"values": (*values, *worst), "skipped": ("pgd-10: no router",)}
    result = result.model_copy(update=changes)
    models["dense"][0] = changed(models["dense"][0], result, kind=Robustness)
    assert "accuracy_pgd-10" not in cells(found, "dense")
    assert "accuracy_pgd-10" in cells(found, "vmoe")
    assert cells(found, "dense")["accuracy_worst_case"] == cells(found, "dense")["accuracy_fgsm"]
    columns = build_table(found, found.phases["pretrain"]).metrics
    (pgd,) = [column for column in columns if column.name == "accuracy_pgd-10"]
    assert pgd.hits(models["dense"][0]) is pgd.items(models["dense"][0]) is None
    assert "pgd-10: no router." in render_report(found)
    assert_self_contained(render_report(found))


def test_augmentations_are_details(whole, text):
    found = cells(whole, "vmoe")
    assert found["match_top1_flip"] == pytest.approx((0.9, 0.85, 0.95))
    assert found["match_top2_sets_noise_0_1"].value == pytest.approx(0.4)
    every = build_table(whole, whole.phases["pretrain"]).metrics
    metrics = {metric.name: metric for metric in every}
    assert metrics["match_top1_flip"].detail
    assert metrics["match_top1_flip"].label == "Match, first expert: flip"
    assert metrics["error_blur"].detail
    small, full = text.split("<summary>All measurements")[:2]
    assert "Match, first expert: flip" in full and "Match, first expert: flip" not in small
    assert "match_top1_flip" in compare_methods(whole)["vmoe"]["pretrain"]


def test_accuracy_within_five_and_the_controls_of_group_sparsity(whole):
    found = cells(whole, "vmoe")
    kept = whole.phases["pretrain"].models["vmoe"][0].outcome.test_top5
    assert found["test_accuracy_top5"] == pytest.approx((kept.value, kept.low, kept.high))
    against = compare_methods(whole)["vmoe"]["pretrain"]["test_accuracy_top5"]["against"]
    assert set(against) == {"dense"}, "paired by images: the calibration keeps the hits"
    # distances 0.11, 0.21, 0.31; beside each twice as much and 1 − d
    assert found["imed_normalised"].value == pytest.approx(0.42)
    assert found["agreement_transformed"].value == pytest.approx(0.79)
    assert found["imed_normalised_rotation_5"] == pytest.approx((0.22, 0.11, 0.33))
    assert found["agreement_transformed_scaling_0_5"].value == pytest.approx(0.79)
    expected = {"border_load": 0.9, "border_mass": 0.8, "border_cells": 0.75, "corner_load": 0.5}
    assert {name: found[name].value for name in expected} == pytest.approx(expected)
    assert found["corner_mass_layer_3"].value == pytest.approx(0.4)
    assert "inner_load" not in found, "a map of 2 × 4 has no inside"
    assert "border_load" not in cells(whole, "dense")


def test_values_of_the_sweeps_and_of_layers_are_columns(whole):
    found = cells(whole, "vmoe")
    assert found["fallback_threshold_0_7"].value == pytest.approx(0.49)
    # T²: from 0.1 to 0.5 by 0.24, from there to 0.7 by as much
    assert found["fallback_slope_below"].value == pytest.approx(0.24 / 0.4)
    assert found["fallback_slope_above"].value == pytest.approx(0.24 / 0.2)
    assert found["tail_mass_k_4"].value == pytest.approx(0.4)
    assert found["score_k_2"].value == pytest.approx(0.72)
    (method,) = [method for method in METHODS if "teacher_agreement" in cells(whole, method)]
    layers = [f"teacher_agreement_layer_{number}" for number in (1, 2, 3)]
    assert [cells(whole, method)[name].value for name in layers] == pytest.approx([0.9] * 3)
    routed = whole.phases["pretrain"].models["vmoe"][0].of(Routing)
    for name, layer in (("match_top1", 2), ("confidence_highest", 3)):
        value = routed.find(f"{name}_layer", layer=layer).value
        assert found[f"{name}_layer_{layer}"].value == value
    metrics = {one.name: one for one in build_table(whole, whole.phases["pretrain"]).metrics}
    assert metrics["score_k_2"].form == "share" and metrics["score_k_2"].detail


def sweep(phase, method, setting, name):
    results = phase.of(Routing)[method]
    return points_over_seeds([result.curve(f"{name}_{setting}", setting) for result in results])


def test_sweeps(whole):
    phase = whole.phases["pretrain"]
    found = sweep(phase, "vmoe", "threshold", "fallback")
    assert [point.x for point in found] == [0.1, 0.3, 0.5, 0.7]
    assert [point.value for point in found] == pytest.approx([0.01, 0.09, 0.25, 0.49])
    mass = sweep(phase, "vmoe", "threshold", "tail_mass")
    assert [point.x for point in mass] == [0.1, 0.3, 0.5], "no tail mass at 0.7"
    assert [point.value for point in sweep(phase, "vmoe", "k", "load_cv2")] == [1, 0.5, 0.25]
    assert sweep(phase, "dense", "k", "score") == []


def test_the_whole_page_and_the_audit_method_by_method(text):
    assert_self_contained(text)
    assert text.count("<h4>") == 7 + 2 * 3, "papers, and two tables a method"
    assert "243 million" not in text, "no claim of a paper is tested, so its numbers are left out"
    # nine lines, of which three are not judged; method 1, vmoe, fails one
    assert "5 of 6 lines of the audit hold" in text
    part = text[text.index("lines of the audit") :]
    row = part[part.index("PGD beats FGSM") : part.index("transfer attack")]
    assert ["✓" in cell for cell in row.split("<td")[1:4]] == [True, False, True]
    assert ["✗" in cell for cell in row.split("<td")[1:4]] == [False, True, False]
    assert "mean loss 1.2 &lt; 1.3" in row
    assert part[part.index("transfer attack") :].split("</tr>")[0].count("not judged") == 3


def test_the_schedule_of_sigma_where_a_method_has_one(drawn, whole):
    sparse = "{router: {kind: noisy_top_k}, regularizers: [{kind: group_sparsity, sigma_end: 2}]}"
    flat_filter = sparse.replace("sigma_end: 2", "filter: average")
    settings = f"methods: {{vmoe: {sparse}, tgr: {flat_filter}}}"
    text = render_report(whole._replace(settings=settings))
    assert text.count("<summary>How the neighbourhood narrows") == 1
    assert "σ from 10 to 2 as in vmoe" in text and "the schedule of vmoe" in text
    assert "How the neighbourhood narrows" not in render_report(whole)


def test_few_shots(tmp_path):
    found = study(tmp_path, stages=("few_shot",))
    row = build_table(found, found.phases["pretrain"]).cells["vmoe"]
    assert row["few_shot_5"].interval == pytest.approx((0.6, 0.5, 0.7))
    assert row["few_shot_5"].kind == "draws"
    assert row["few_shot_5_leaky"].interval.value == pytest.approx(0.7) and "few_shot_25" not in row
    text = render_report(found)
    assert_self_contained(text)
    assert "5-shot accuracy" in text and "draws of few-shot images" in text
    assert "25 shots: the smallest class, Coat, has 9 training images." in text
    assert "penalty chosen on test (leaky)" in text and "<summary>Few shots" in text


def test_several_labels_an_image(tmp_path):
    found = study(tmp_path, stages=("routing",))
    phase = found.phases["pretrain"]
    task = MultiLabel(classes=CLASSES)
    for seeds in phase.models.values():
        changes = {"task": task, "confusion": None, "test_top5": None}
        seeds[0] = changed(seeds[0], seeds[0].outcome.model_copy(update=changes))
    found.phases["pretrain"] = phase._replace(task=task)
    text = render_report(found)
    assert "Precision at 1" in text and "1 − false discovery rate" in text
    assert "Test accuracy" not in text and "Confusion" not in text
    compared = compare_methods(found)["vmoe"]["pretrain"]
    assert "test_accuracy" in compared, "claims know it by this name"


def test_the_cost_of_a_training_step_is_shown_where_the_training_told_it(whole):
    assert not {"training_step_ms", "training_memory_mb"} & set(cells(whole, "vmoe"))
    trained = whole.phases["pretrain"].models["vmoe"][0].outcome
    told = trained.model_copy(update={"training_step_ms": 61.0, "training_memory_mb": 512.5})
    read = collect_outcome_values(told).numbers()
    assert (read["training_step_ms"], read["training_memory_mb"]) == (61.0, 512.5)
