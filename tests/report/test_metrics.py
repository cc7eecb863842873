import re

import pytest

from moecore.measure import Routing, invariance
from moecore.measure.training import value_halfway
from moecore.measure.values import place_slug
from moecore.report import column, report_files, results_and_displays
from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.figures import model_figures as module
from moecore.report.figures.drawing import PALETTE
from moecore.report.page.report_page import render_report
from moecore.report.tables import metrics_by_method
from moecore.report.tables.cells import REPORTED_MODELS, TITLES
from moecore.report.tables.terminal_summary import headline_rows
from moecore.study.model_rules import load_data_previews
from moecore.study.params_reader import extract_settings
from moecore.study.run_and_claims import RunSelection
from moecore.study.stages import MEASURED_STAGES, describe_how_to_add
from moecore.study.study import Study
from moecore.study.yaml_document import load_yaml_document, parse_yaml_document
from tests.project import PARAMS, SHIPPED
from tests.report.generated import EPSILONS, NEW, TRANSFORMS, write_results
from tests.report.test_claims import claim
from tests.report.test_report import METHODS, assert_self_contained

pytestmark = pytest.mark.usefixtures("undrawn")
ALL = (*MEASURED_STAGES, "invariance", *NEW)


def study(root, seeds=(0,), stages=ALL, methods=METHODS):
    write_results(root, methods, list(seeds), ["pretrain"], stages)
    run = RunSelection(methods=tuple(methods), seeds=tuple(seeds), phases=("pretrain",))
    return results_and_displays.read_results(run, "", root, stages)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return study(tmp_path_factory.mktemp("whole"))


def test_the_values_come_from_where_they_are_stored(whole):
    phase = whole.phases["pretrain"]
    cells = metrics_by_method.build_table(whole, phase).cells["vmoe"]  # generated method 1, seed 0
    routed = phase.models["vmoe"][0].of(Routing)
    trained = phase.models["vmoe"][0].outcome
    expected = {"match_top1": 0.52, "match_top2_ordered": 0.32, "match_top2_sets": 0.42}
    expected |= {"token_entropy": 0.43, "fallback": 0.01, "below_k": 0.02, "tail_mass": 0.05}
    # half of ten epochs is the fifth: 0.5 + 0.01; the last two epochs: 0.5 + 0.4; distances 0.11,
    # 0.21, 0.31
    expected |= {"agreement_with_final": 0.51, "saturation": 0.755, "agreement_consecutive": 0.9}
    # early: between the 3rd and the 4th epoch
    expected |= {"agreement_consecutive_early": 0.66, "agreement_consecutive_mean": 0.74}
    expected |= {"imed": 0.21, "imed_rotation_5": 0.11, "imed_translation_0_0_1": 0.31}
    assert {name: cells[name].interval.value for name in expected} == pytest.approx(expected)
    for place in ("highest", "second", "others"):
        of_layers = routed.curve(f"confidence_{place}_layer", "layer").values()
        assert cells[f"confidence_{place}"].interval.value == pytest.approx(sum(of_layers) / 3)
    assert len(trained.agreement_with_final) == 10 and cells["imed_rotation_5"].kind == "bootstrap"
    assert cells["imed_rotation_5"].interval == pytest.approx((0.11, 0.09, 0.13))


def test_half_of_training():
    assert [value_halfway(range(1, last + 1)) for last in (1, 2, 5, 10)] == [1, 1, 3, 5]


def test_a_dense_model_has_none_of_it(whole):
    cells = metrics_by_method.build_table(whole, whole.phases["pretrain"]).cells["dense"]
    found = {name for name, one in cells.items() if one}
    of_routing = re.compile("match|imed|load|entropy|agreement|border|corner|confidence|fallback")
    assert {"test_accuracy", "mce", "routing_ms"} < found
    assert not [name for name in found if of_routing.search(name)]


def test_names_are_unique_those_of_transforms_too_and_papers_are_known(whole):
    metrics = metrics_by_method.phase_result_columns(whole.phases["pretrain"])
    names = {metric.name for metric in metrics}
    assert len(names) == len(metrics)
    order = [metric.paper for metric in metrics]
    assert set(order) == {"", *TITLES} and order == sorted(order, key=["", *TITLES].index)
    assert all(found.paper in TITLES for found in REPORTED_MODELS)
    values = {name for found in REPORTED_MODELS if found.paper != "ages" for name in found.values}
    assert {name for name in values if not name.startswith("imed_")} <= names
    paper = next(found for found in REPORTED_MODELS if found.model == "MoGE").values
    names = {f"imed_{place_slug(name)}" for name in invariance.TRANSFORMS}
    assert names == {name for name in paper if name.startswith("imed_")}


def test_one_table_a_paper_with_its_own_numbers(whole):
    papers = ("PRC", "ERMoE", "TGR", "MoGE", "adversarial")
    asked = [claim(paper=name, method="tgr") for name in papers]
    text = render_report(whole, evaluate_claims(asked, whole))
    text = text[text.index("Every method on the metrics of every paper</summary>") :]
    text = text[: text.index("<summary>Training")]
    assert text.count("<h4>") == 7
    assert all(number in text for number in ("63.04 %", "0.0297", "41.7 %", "0.0473"))
    tgr = text[text.index("TGR: ") : text.index("MoGE: ")]
    assert "Without these metrics: dense." in tgr and ">dense<" not in tgr
    prc = text[text.index("PRC: ") : text.index("ERMoE: ")]
    assert prc.count("<dt>") == 2 and prc.count('class="paper"') == 14
    assert ">dense<" in text[text.index("On the adversarial") :]


SHOWN = {  # stage → a metric, words of the page
    "calibrate": ("ece_after", "Reliability"),
    "robustness": ("accuracy_fgsm", "Attacked pictures"),
    "routing": ("match_top1", "Which expert sees which patch"),
    "invariance": ("imed", ""),
    "corruptions": ("mce", "Common corruptions"),
    "lipschitz": ("lipschitz_local_mean", ""),
    "cost": ("gflops", "Cost of a trained model"),
    "stability": ("jumps", "<summary>Noise"),
}
TOGETHER = ("", "calibrate lipschitz", "robustness", "routing invariance", "corruptions stability")


@pytest.mark.parametrize("together", [*TOGETHER, "cost"])
def test_a_study_with_some_stages(tmp_path, together):
    stages = together.split()
    found = study(tmp_path, stages=stages)
    text = render_report(found)
    assert_self_contained(text)
    table = metrics_by_method.build_table(found, found.phases["pretrain"])
    names = {metric.name for metric in table.metrics}
    for stage, (name, words) in SHOWN.items():
        assert (name in names) == (stage in stages), stage
        assert not words or (words in text) == (stage in stages), stage
    assert ("lines of the audit" in text) == ("robustness" in stages)
    assert (report_files.robustness_csv(found).count("\n") > 1) == ("robustness" in stages)
    printed = headline_rows(metrics_by_method.compare_methods(found))[0]
    assert ("ece_after" in printed) == ("calibrate" in stages)
    attacked = {name for name in printed if name.startswith("accuracy_")}
    every = {"accuracy_fgsm", "accuracy_pgd-10", "accuracy_worst_case"}  # of the largest epsilon
    assert attacked == (every if "robustness" in stages else set())


def test_agreement_over_epochs(tmp_path):
    seeds = study(tmp_path, seeds=(0, 1, 2)).phases["pretrain"].outcomes["vmoe"]
    final, _, consecutive = (module.agreement_points(seeds, name) for name in module.AGREEMENTS)
    # method 1: 0.11, 0.13, 0.15 in the first epoch: mean 0.13, half 4.302653 · 0.02 / √3
    assert final[0] == pytest.approx((1, 0.13, 0.080317, 0.179683), abs=1e-6)
    assert [point.x for point in final] == list(range(1, 11))
    assert [point.x for point in consecutive] == list(range(2, 11)) and final[-1].high == 1.0
    assert consecutive[-1].value == pytest.approx(0.91)
    one = module.agreement_points(seeds[:1], "agreement_with_final")[0]
    assert one.low == one.value == one.high == pytest.approx(0.11)


def test_agreement_is_drawn_for_those_who_have_it(drawn, whole):
    trained = whole.phases["pretrain"].outcomes
    curves = {
        name: {method: module.agreement_points(seeds, name) for method, seeds in trained.items()}
        for name in module.AGREEMENTS
    }
    panels = module.draw_routing_agreement(curves).axes
    assert curves["agreement_with_final"]["dense"] == []
    assert [axes.get_title("left") for axes in panels] == list(module.AGREEMENTS.values())
    colours = [[line.get_color() for line in axes.lines] for axes in panels]
    assert colours == [list(PALETTE[1:3])] * 3
    assert list(panels[2].lines[0].get_xdata()) == list(range(2, 11))


def test_unrecorded_values_are_left_out(whole):
    trained = whole.phases["pretrain"].outcomes["vmoe"][0]
    without = trained.model_copy(update=dict.fromkeys(module.AGREEMENTS, ()))
    assert module.agreement_points([without], "agreement_with_final") == []
    assert module.agreement_points([trained, without], "agreement_with_final") == []
    values = dict.fromkeys(module.AGREEMENTS, ()) | {"agreement_consecutive": (None, 0.5)}
    gap = trained.model_copy(update=values)
    assert [point.x for point in module.agreement_points([gap], "agreement_consecutive")] == [2]


SETTINGS = """
run: {methods: [vmoe, prc], seeds: [0], phases: [pretrain], measurements: [stability]}
data: {pretrain: {kind: digits, size: 28}}
robustness: {epsilons: [0.01], attacks: [{kind: pgd, steps: 10}]}
routing: {augmentations: [noise]}
stability: {}
corruptions: {names: [gaussian_noise]}
methods:
  vmoe: &guided
    router: {kind: eigenbasis}
    experts: {kind: eigen}
    regularizers: [{kind: router_kl}]
  prc: *guided
  plain: {router: {kind: top_p}, experts: {kind: mlp}}
  dense: {}
"""
STAGES = ("pretrain", "robustness", "routing", "measure", "compare")
ASKED = "asks: so, method: prc, against: vmoe, better: higher"


def problems_of(text: str) -> list[tuple[tuple, str]]:
    study = extract_settings(Study, parse_yaml_document(text))
    return list(metrics_by_method.unanswerable_claims(study, STAGES, previews={}))


def misnamed(metric: str, phase: str = "pretrain", asked=ASKED) -> list[tuple[tuple, str]]:
    question = f"{{{asked}, metric: '{metric}', phase: {phase}}}"
    return problems_of(f"{SETTINGS}questions: [{question}]\n")


def test_a_metric_is_foreseen():
    names = "test_accuracy test_loss accuracy_pgd-10 accuracy_worst_case noise_accuracy".split()
    names += "routing_change_pgd-10 fallback match_top1_noise agreement_with_final".split()
    names += ["teacher_agreement", "training_overhead"]
    questions = [f"{{{ASKED}, metric: {name}, phase: pretrain}}" for name in names]
    assert problems_of(f"{SETTINGS}questions: [{', '.join(questions)}]\n") == []
    assert misnamed("anything", "finetune") == [], "a phase that is not there is judged elsewhere"


def test_a_metric_that_the_study_will_not_have_is_refused():
    near = {"test_acuracy": "test_accuracy", "accuracy_pgd-20": "accuracy_pgd-10"}
    near |= {"match_top1_flip": "match_top1", "agreement_before_after": "agreement_consecutive"}
    for metric in (*near, "test_mae", "imed", "ece_after", "early_choice"):
        ((keys, text),) = misnamed(metric)
        hint = f", did you mean {near[metric]!r}?" if metric in near else ""
        if metric == "ece_after":
            hint = f", a metric of {describe_how_to_add('calibrate')}"
        assert keys == ("questions", 0, "metric") and "; allowed in pretrain: test_acc" in text
        assert text.startswith(f"found {metric!r}{hint};")


def test_a_metric_that_one_method_alone_lacks_is_refused():
    # dense has no routers; nothing guides plain, and top_p's threshold is none of scores
    lacking = {"agreement_with_final": "dense", "teacher_agreement": "plain", "fallback": "plain"}
    for metric, method in (lacking | {"fallback_threshold_0_5": "plain"}).items():
        text = SETTINGS.replace("[vmoe, prc]", f"[vmoe, {method}]")
        asked = f"asks: so, metric: {metric}, method: vmoe, against: {method}, better: higher"
        words = f"found {method}, which will have no {metric}; allowed: vmoe"
        problems = problems_of(f"{text}questions: [{{{asked}}}]\n")
        assert problems == [(("questions", 0, "against"), words)]


def test_a_metric_of_the_settings_or_between_too_few_seeds_is_refused():
    for metric in ("parameters", "border_cells"):
        ((keys, text),) = misnamed(metric)
        assert keys == ("questions", 0, "metric") and text.startswith(f"found {metric}: ")
    text = SETTINGS.replace("routing: {", "routing: {roles: {}, ")
    text += f"questions: [{{{ASKED}, metric: seed_stability, phase: pretrain}}]\n"
    ((keys, problem),) = problems_of(text)
    assert keys[2] == "metric" and "compares seeds, and run.seeds has 1; allowed: two" in problem
    assert problems_of(text.replace("[0]", "[0, 1]", 1)) == []


def test_two_points_of_a_curve_that_can_only_rise_are_no_direction():
    points = "against_metric: fallback_threshold_0_5, method: prc, against: prc"
    asked = f"asks: so, {points}, better: higher"
    ((keys, text),) = misnamed("fallback_threshold_0_9", asked=asked)
    assert keys == ("questions", 0, "against_metric") and "another point of fallback" in text
    within = asked.replace("higher", "equivalent, margin: 0.1")
    for fair in (within, asked.replace("against: prc", "against: vmoe")):
        assert misnamed("fallback_threshold_0_9", asked=fair) == []
    assert misnamed("score_k_4", asked=asked.replace("fallback_threshold_0_5", "score_k_2")) == []


def test_no_worse_needs_a_metric_that_can_be_worse():
    asked = ASKED.replace("higher", "no_worse, margin: 0.1")
    assert misnamed("test_loss", asked=asked) == misnamed("test_accuracy", asked=asked) == []
    ((keys, text),) = misnamed("token_entropy", asked=asked)
    assert keys == ("questions", 0, "better") and "token_entropy is worse" in text


def test_a_method_that_a_measurement_refuses_is_named_before_anything_runs():
    text = PARAMS.replace("phases: [finetune]", "phases: [pretrain, finetune]")
    text = text.replace("[finetune]\n", "[pretrain]\n").replace("lipschitz", "router_regret", 1)
    asked = "asks: so, method: vmoe, better: lower, phase: pretrain"
    first = f"{{{asked}, metric: router_regret, against: dense}}"
    second = f"{{{asked}, metric: load_cv2, against: tgr}}"
    settings = parse_yaml_document(text.replace("ions: []", f"ions: [{first}, {second}]"))
    study = extract_settings(Study, settings)
    [(keys, line)] = metrics_by_method.unanswerable_claims(study, STAGES, load_data_previews(study))
    assert keys == ("questions", 0, "against")
    assert line.startswith("found dense, which will have no router_regret: a dense model has no")
    assert line.endswith("; allowed: methods that router_regret measures")


def test_a_method_whose_tokens_choose_no_experts_has_no_roles():
    """consistency_4 no method has, as no window is of 4 tokens; a load every router has."""
    text = PARAMS.replace("[finetune]\n", "[pretrain]\n")
    text = text.replace("{images: 32, aug", "{roles: {windows: [3]}, images: 32, aug")
    router = "tgr:\n    router: {kind: "
    text = text.replace(f"{router}noisy_top_k", f"{router}expert_choice")
    asked = "asks: so, method: vmoe, against: tgr, phase: pretrain, better: higher"
    names = ("consistency_3", "consistency_4", "load_cv2")
    entries = [f"{{{asked}, metric: {name}}}" for name in names]
    settings = parse_yaml_document(text.replace("ions: []", f"ions: [{', '.join(entries)}]"))
    study = extract_settings(Study, settings)
    problems = dict(metrics_by_method.unanswerable_claims(study, STAGES, load_data_previews(study)))
    assert list(problems) == [("questions", 0, "against"), ("questions", 1, "metric")]
    refused, unknown = problems.values()
    assert "with the router expert_choice tokens choose no experts" in refused
    assert unknown.startswith("found 'consistency_4'")


def test_every_metric_of_a_study_was_foreseen(whole):
    """A claim may name it: what no entry of the tables of columns foresees, it could not."""
    metrics = metrics_by_method.build_table(whole, whole.phases["pretrain"]).metrics
    text = SETTINGS.replace("[{kind: pgd, steps: 10}]", "[{kind: fgsm}, {kind: pgd, steps: 10}]")
    text = text.replace("[0.01]", str([epsilon for epsilon in EPSILONS if epsilon]))
    text = text.replace("[stability]", str([*NEW, "invariance"]))
    study = extract_settings(Study, parse_yaml_document(text))
    known = metrics_by_method.expected_metrics(study, (*STAGES, "calibrate"), "pretrain")
    generated = {"error_noise", "error_blur"}  # of made-up corruptions
    generated |= {f"imed_{place_slug(name)}" for name in TRANSFORMS}
    generated |= {metric.name for metric in metrics if re.search("_layer_[0-9]+$", metric.name)}
    lost = {metric.name for metric in metrics} - set(known) - generated
    for metric in metrics:
        if planned := known.get(metric.name):
            expected = (metric.form, metric.better, metric.of_pairs)
            assert (planned.form, planned.better, planned.of_pairs) == expected, metric.name
    assert {name for name in lost if not re.match("match_.*_(noise|flip)", name)} == set()


def test_columns_of_layers_are_foreseen_for_the_layers_that_the_methods_have():
    study = extract_settings(Study, load_yaml_document(SHIPPED))
    layers = column.PhaseBeforeRun(study, "accuracy", "pretrain").layers
    assert list(layers) == [1, 2], "last_2 of four blocks"
    known = metrics_by_method.expected_metrics(study, (*STAGES, "calibrate"), "pretrain")
    assert {"border_load_layer_2", "routing_change_pgd-10_layer_1"} <= set(known)
    assert "border_load_layer_3" not in known
    alone = study.model_copy(update={"run": study.run.model_copy(update={"methods": ("dense",)})})
    assert not column.PhaseBeforeRun(alone, "accuracy", "pretrain").layers
