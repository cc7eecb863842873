import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtr

from moecore.core.arrays_as_text import encode_exact
from moecore.core.files import UserError
from moecore.measure.robustness import Robustness
from moecore.measure.training import Trained
from moecore.parts import Classification, Config
from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.claims.significance import choose_test, compare_with_reference
from moecore.report.column import Column, find_moe_baseline, reference_methods
from moecore.report.figures.overview import axis_limits_with_margin, draw_overview
from moecore.report.headline_quantities import choose_main_quantities
from moecore.report.page import page_objects, report_page, sections
from moecore.report.result_types import ModelResults, StudyResults
from moecore.report.tables import metrics_by_method
from moecore.statistics.intervals import Interval
from tests.report.generated import changed, model_with_results, trained, with_values
from tests.report.test_ages import results as results_of_ages
from tests.report.test_claims import claim
from tests.report.test_claims import study as claimed
from tests.report.test_report import results

pytestmark = pytest.mark.usefixtures("undrawn")
ROOT = Path(__file__).parents[2]
DENSE = "methods: {dense: {}, vmoe: {router: {kind: noisy_top_k}}, tgr: {router: {kind: x}}}"
CHANGED = "each pixel changed by at most 3.1 % of its range (ε = 8/255)."


class Found(Config):
    value: float | None = 0.0
    hits: tuple[bool, ...] | None = None


def model(hits=None, value: float | None = 0.0) -> ModelResults:
    return model_with_results(Found(value=value, hits=None if hits is None else tuple(hits)))


def sized(parameters: int = 10) -> ModelResults:
    sizes = {"parameters": parameters, "active_parameters": 10}
    return model_with_results(trained(0, 0, False, "pretrain").model_copy(update=sizes))


def right(*wrong: int, count: int = 100) -> np.ndarray:
    """Hits of all images but those."""
    found = np.ones(count, dtype=bool)
    found[list(wrong)] = False
    return found


def hits_of(model: ModelResults) -> np.ndarray | None:
    found = model.of(Found).hits
    return None if found is None else np.array(found)


def metric(read, better, form="number", hits=None) -> Column:
    return Column("share" if hits else "value", "", read, better, form, kind=Found, read_hits=hits)


SHARE = metric(lambda found: Interval(np.mean(found.hits), 0, 1), "higher", "share", hits_of)
VALUE = metric(lambda found: found.value, "lower")
WITHIN = metric(lambda found: Interval(found.value, found.value - 0.1, found.value + 0.1), "lower")
NEITHER = metric(lambda found: found.value, "")


def one_seed(**hits) -> dict[str, dict[int, ModelResults]]:
    return {name: {0: model(found)} for name, found in hits.items()}


def seeds(**values) -> dict[str, dict[int, ModelResults]]:
    models = {name: [model(value=value) for value in found] for name, found in values.items()}
    return {name: dict(enumerate(of_seeds)) for name, of_seeds in models.items()}


def marked(metric: Column, models) -> list[str]:
    cells = metrics_by_method.cells_with_best_marked(metric, models)
    return [method for method, cell in cells.items() if cell and cell.marked]


def test_one_seed_is_tested_on_the_images():
    # b alone is right on 10 images, a alone on 2: exact p = 158 / 4096
    models = one_seed(a=right(*range(10)), b=right(50, 51))
    found = compare_with_reference(SHARE, models, "a")["b"]
    assert (found.test, found.only) == ("mcnemar", (10, 2))
    assert found.p == found.holm == pytest.approx(158 / 4096)
    assert found.difference.value == pytest.approx(0.08)
    assert 0 < found.difference.low < 0.08 < found.difference.high
    assert marked(SHARE, models) == ["b"], "although the intervals 0 … 1 of both overlap"


def test_a_difference_that_does_not_stand_is_not_marked():
    # 7 and 2: p = 2 · (1 + 9 + 36) / 512 = 0.18
    assert marked(SHARE, one_seed(a=right(*range(7)), b=right(50, 51))) == []
    assert marked(SHARE, one_seed(a=right(1), b=right(1))) == []
    assert marked(SHARE, one_seed(a=right(1))) == []
    models = seeds(a=(1.0, 2.0, 3.1), b=(2.0, 3.0, 4.0))  # neither is better
    assert marked(NEITHER, models) == [] and compare_with_reference(NEITHER, models, "a") == {}


def test_holm_takes_the_number_of_comparisons_into_account():
    # 10 against 2 has p = 0.0386, which stands alone; against two such methods 2 · 0.0386 does not
    two = one_seed(a=right(*range(10)), b=right(50, 51))
    three = two | one_seed(c=right(*range(20, 30)))
    found = compare_with_reference(SHARE, three, "b")
    assert [tested.holm for tested in found.values()] == pytest.approx([2 * 158 / 4096] * 2)
    assert marked(SHARE, two) == ["b"] and marked(SHARE, three) == []
    weak = right(*range(20))  # the best must beat each other method
    assert marked(SHARE, one_seed(a=weak, b=right(50), c=weak)) == ["b"]
    assert marked(SHARE, one_seed(a=weak, b=right(50), c=right(51))) == []


def test_several_seeds_are_tested_pair_by_pair():
    # differences 0.1, 0.11, 0.09: t = 0.1 / (0.01 / √3) = 17.3; the seeds' own spread is far larger
    models = seeds(a=(0.2, 0.61, 0.89), b=(0.1, 0.5, 0.8))
    found = compare_with_reference(VALUE, models, "b")["a"]
    assert found.test == "seeds" and found.difference.value == pytest.approx(0.1)
    assert found.p == pytest.approx(1 - np.sqrt(300 / 302), rel=1e-6)
    assert marked(VALUE, models) == ["b"], "lower is better"
    assert marked(VALUE, seeds(a=(0.2, 0.61, 0.89), b=(0.3, 0.5, 0.8))) == []


def test_without_a_paired_test_the_intervals_decide():
    assert choose_test(WITHIN, [{0: model()}]) == "intervals"
    assert choose_test(SHARE, [{0: model(None)}]) == "intervals"
    assert marked(WITHIN, seeds(a=(0.5,), b=(0.1,))) == ["b"]
    assert marked(WITHIN, seeds(a=(0.25,), b=(0.1,))) == []
    assert compare_with_reference(WITHIN, seeds(a=(0.5,), b=(0.1,)), "a") == {}
    assert marked(VALUE, seeds(a=(0.5,), b=(0.1,))) == []


def test_without_the_metric_none_takes_part_and_other_images_or_seeds_are_an_error():
    models = seeds(a=(0.2, 0.61, 0.89), b=(0.1, 0.5, 0.8), dense=(None, None, None))
    found = metrics_by_method.cells_with_best_marked(VALUE, models)
    assert found["dense"] is None and found["b"].marked and not found["a"].marked
    with pytest.raises(UserError, match="100 images, another method's of 90"):
        compare_with_reference(SHARE, one_seed(a=right(1), b=right(1, count=90)), "b")
    models = seeds(a=(1.0, 2.0), b=(1.0, 2.0))
    models["b"] = {5: models["b"][0], 6: models["b"][1]}
    with pytest.raises(UserError, match="seeds"):
        compare_with_reference(VALUE, models, "a")


def test_what_methods_are_compared_with():
    plain = {0: sized()}
    routed = {0: sized(parameters=20)}
    assert find_moe_baseline({"dense": plain, "prc": routed, "vmoe": routed}) == "vmoe"
    assert reference_methods({"dense": plain, "prc": routed, "tgr": routed}) == ["prc", "dense"]
    assert reference_methods({"told": routed, "prc": routed, "dense": plain}) == ["prc", "dense"]
    assert reference_methods({"a": plain}) == [] and find_moe_baseline({"a": plain}) == ""


def test_compare_json_has_the_tests_and_the_page_names_them(tmp_path):
    one = results(tmp_path / "one")
    many = results(tmp_path / "many", seeds=(0, 1, 2))
    compared = metrics_by_method.compare_methods(one)["tgr"]["pretrain"]
    for name, n in (("test_accuracy", 600), ("accuracy_fgsm", 200), ("accuracy_worst_case", 200)):
        assert set(compared[name]["against"]) == {"vmoe", "dense"}
        tested = compared[name]["against"]["vmoe"]
        assert tested["test"] == "mcnemar" and 0 <= tested["p"] <= tested["p_holm"] <= 1
        assert tested["low"] <= tested["difference"] <= tested["high"]
        more = tested["only_first"] - tested["only_second"]
        assert tested["difference"] == pytest.approx(more / n)
    assert "against" not in compared["ece_after"] and "against" not in compared["parameters"]
    found = metrics_by_method.compare_methods(many)
    vmoe, tgr = (found[method]["pretrain"] for method in ("vmoe", "tgr"))
    assert tgr["load_cv2"]["against"]["vmoe"]["test"] == "seeds"
    assert tgr["accuracy_fgsm"]["against"]["vmoe"]["test"] == "items × seeds"
    assert "against" not in tgr["parameters"] and "dense" not in tgr["load_cv2"]["against"]
    assert "vmoe" not in vmoe["test_accuracy"]["against"]
    for shown, used in ((one, {"mcnemar", "intervals"}), (many, {"items × seeds", "seeds"})):
        phase = shown.phases["pretrain"]
        table = metrics_by_method.build_table(shown, phase)
        assert metrics_by_method.used_tests(shown, phase, table) == used
        text = report_page.render_report(shown)
        assert ("McNemar" in text) == ("mcnemar" in used)
        assert ("paired test over seeds" in text) == ("seeds" in used)


def answered(found: StudyResults) -> str:
    return report_page.build_page(found, ()).answer.replace("\u00a0", " ")


def with_hits(found: StudyResults, method: str, wrong: int) -> None:
    """Its attacked images all right but ``wrong``, at every epsilon."""
    phase = found.phases["pretrain"]
    result = phase.models[method][0].of(Robustness)
    items = encode_exact(np.arange(200) >= wrong)
    kept = {"value": 1 - wrong / 200, "low": 0.9, "high": 1.0, "items": items}
    for metric in ("attacked", "worst"):
        result = with_values(result, metric, **kept)
    phase.models[method][0] = changed(phase.models[method][0], result, kind=Robustness)


def test_a_mark_is_shown(tmp_path):
    shown = results(tmp_path, {"dense": False, "vmoe": True}, phases=("pretrain",))
    before = report_page.render_report(shown).count('class="best"')
    with_hits(shown, "vmoe", 0)
    cells = metrics_by_method.build_table(shown, shown.phases["pretrain"]).cells
    assert cells["vmoe"]["accuracy_fgsm"].interval.value == 1
    assert cells["vmoe"]["accuracy_fgsm"].marked and not cells["dense"]["accuracy_fgsm"].marked
    assert report_page.render_report(shown).count('class="best"') > before


def test_one_seed_shows_no_difference_of_the_routing(tmp_path):
    found = results(tmp_path)
    text = answered(found)
    # generated: the change is 0.5 for every method
    overlap = "Pretrained on Fashion-MNIST: under attack routing overlap is "
    words = "50.0 %. Under the worst attack tgr is 3.0 percentage points more accurate than vmoe"
    assert text.startswith(overlap + words)
    assert text.endswith("Attack: FGSM, PGD 10; " + CHANGED), "named only, without their settings"
    other = found._replace(settings="robustness: {attacks: [kind: fgsm, {kind: pgd, steps: 10}]}")
    assert answered(other).endswith("Attack: FGSM, PGD (10 steps); " + CHANGED)
    phase = found.phases["pretrain"]
    result = with_values(phase.models["tgr"][0].of(Robustness), "routing_change", value=0.3)
    phase.models["tgr"][0] = changed(phase.models["tgr"][0], result, kind=Robustness)
    assert answered(found).startswith(overlap + "50.0 to 70.0 %. ")


def test_dense_models_and_routers_that_learned_nothing_are_never_the_best(tmp_path):
    found = results(tmp_path, phases=["pretrain"])
    hashed = found._replace(settings=DENSE.replace("noisy_top_k", "hash"))
    assert hashed.controls == {"vmoe"}
    assert "vmoe" not in answered(hashed) and "routing overlap is" in answered(hashed)
    found = found._replace(settings=DENSE)
    with_hits(found, "dense", 0)
    assert found.without_experts == {"dense"}
    assert "Under the worst attack dense is 74.0" in answered(found)
    cells = metrics_by_method.build_table(found, found.phases["pretrain"]).cells
    worst = {method: row["accuracy_worst_case"] for method, row in cells.items()}
    assert worst["dense"].leads and not any(cell.marked for cell in worst.values())


def test_what_was_not_measured_names_its_stage(tmp_path):
    found = results(tmp_path, phases=["pretrain"])
    for seeds in found.phases["pretrain"].models.values():
        left = {kind: one for kind, one in seeds[0].results.items() if kind is Trained}
        seeds[0] = seeds[0]._replace(results=left)
    page = report_page.build_page(found, ())
    notes = page.overviews[0].below
    assert "Not measured: the score under attack (the stage robustness would)." in notes
    assert len(page.overviews[0].pictures) == 1, "no scatter"
    # agreement over the epochs stands in for the routing under attack
    assert "first experts are settled halfway through training" in page.answer


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_errors_have_their_unit(tmp_path, seeds):
    text = answered(results_of_ages(tmp_path, seeds))
    assert text.startswith("Pretrained on Small cohort: ")
    assert re.search(r"Under the worst attack the mean absolute error of .* lower than", text)
    assert "accurate" not in text and "worst case" not in text


def test_claims_are_counted():
    shown = claimed(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89])
    asked = [claim(), claim(better="lower"), claim(metric="test_accuracy")]
    text = sections.describe_verdict_counts(evaluate_claims(asked, shown))
    assert text.startswith("Of 3 claims tested here, 1 holds (prc against vmoe: Match")
    assert "1 differs here" in text and "1 is open: not significant" in text
    one = sections.describe_verdict_counts(evaluate_claims(asked[:1], shown))
    assert one.startswith("The one claim tested here holds (prc against vmoe: ")


def test_pictures_hold_their_data(drawn, tmp_path):
    found = results(tmp_path, phases=["pretrain"])
    phase = found.phases["pretrain"]
    known = choose_main_quantities(phase, metrics_by_method.build_table(found, phase))
    scatter, rows = (one.figure for one in draw_overview(phase, known))
    for figure in (scatter, rows):
        for axes in figure.axes:
            (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
            for line in axes.lines:
                assert all(left <= x <= right for x in line.get_xdata())
                assert all(low <= y <= high for y in line.get_ydata())
    names = {text.get_text() for text in scatter.axes[0].texts}
    assert names == set(phase.models), "every point has its name"
    assert axis_limits_with_margin([0.99, 1.0], "share")[1] <= 1.03


def test_words_explain_columns():
    assert page_objects.find_glossary_term("imed_rotation_5") == "IMED"
    assert page_objects.find_glossary_term("mce") == "mCE"
    for name in ("accuracy_worst_case", "attacked_mae_worst_case"):
        assert page_objects.find_glossary_term(name) == "worst case"
    assert page_objects.find_glossary_term("test_accuracy") == ""
    terms = report_page.template_environment().get_template("parts.html.jinja").module.glossary
    assert all("\n" not in text and not text.endswith(".") for text in terms.values())
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = {row[0]: row[1] for row in cells if len(row) == 2}
    assert {name: rows[name] for name in terms} == terms, "the glossary has the same words"


def test_a_study_of_a_thousand_classes(tmp_path):
    found = results(tmp_path, phases=["pretrain"])
    phase = found.phases["pretrain"]
    classes = tuple(f"class {number}" for number in range(1000))
    task = Classification(classes=classes)
    counts = [[0] * 1000 for _ in classes]
    for number, row in enumerate(counts):
        row[number] = 9
    counts[7][8] = 3
    for seeds in phase.models.values():
        outcome = seeds[0].outcome.model_copy(update={"task": task, "confusion": counts})
        seeds[0] = changed(seeds[0], outcome)
    found.phases["pretrain"] = phase._replace(task=task)
    section = report_page.build_page(found, ()).sections[0]
    block = next(one for one in section.blocks if one.title == "Confusion of classes")
    assert block.finding == "class 7 is taken for class 8 most often (25\u00a0%, mean over methods)"
    assert [len(tile.lines) for tile in block.tiles] == [1, 1, 1]
    quantities = choose_main_quantities(phase, metrics_by_method.build_table(found, phase))
    assert sections.describe_phase_findings(phase, "x", quantities, ())


def test_pairs_of_seeds_are_tested_by_the_jackknife():
    # Pairs 0.2, 0.4, 0.6 less 0.1, 0.2, 0.3: 0.2; without each seed 0.3, 0.2, 0.1. Variance
    # 2/3 · 0.02, half width 4.302653 · 0.115470.
    pairs = {(0, 1): 0.2, (0, 2): 0.4, (1, 2): 0.6, (3, 4): 0.1, (3, 5): 0.2, (4, 5): 0.3}
    between = metric(lambda one, other: pairs[one.value, other.value], "higher")
    between = between._replace(of_pairs=True)
    models = seeds(ours=[0, 1, 2], theirs=[3, 4, 5])
    (tested,) = compare_with_reference(between, models, "theirs").values()
    assert tested.difference == pytest.approx((0.2, 0.2 - 0.496828, 0.2 + 0.496828), abs=1e-6)
    assert tested.p == pytest.approx(2 * stdtr(2, -(3**0.5))) and marked(between, models) == []
    two = seeds(ours=[0, 1], theirs=[3, 4])
    assert compare_with_reference(between, two, "theirs") == {} and marked(between, two) == []
