"""The sentence that answers the page's title says what was shown, and no more."""

import re
from pathlib import Path

import pytest
import torch

from moecore.measure.robustness import Result as Robustness
from moecore.report.answer import answer, answer_of_claims
from moecore.report.claims import evaluate
from moecore.report.measured import Results
from moecore.report.overview import hold, pictures
from moecore.report.page import page_of
from moecore.report.quantities import quantities
from moecore.report.tables import table
from moecore.report.words import WORDS, word_of
from moecore.tasks.classification import Classification
from moecore.training.outcome import Outcome
from tests.report.generated import TASK, changed
from tests.report.test_ages import results as results_of_ages
from tests.report.test_claims import claim
from tests.report.test_claims import study as claimed
from tests.report.test_report import results

ROOT = Path(__file__).parents[2]
DENSE = "methods: {dense: {}, vmoe: {router: {kind: noisy_top_k}}, tgr: {router: {kind: x}}}"


def answered(found: Results) -> str:
    """The sentence, its spaces plain."""
    return page_of(found, ()).answer.replace("\u00a0", " ")


def with_hits(found: Results, method: str, wrong: int) -> None:
    """Its attacked images all right but ``wrong``, at every epsilon."""
    phase = found.phases["pretrain"]
    result = phase.models[method][0].of(Robustness)
    right = torch.arange(200) >= wrong
    kept = {"score": 1 - wrong / 200, "low": 0.9, "high": 1.0, "scores": TASK.packed(right)}
    attacks = {
        name: tuple(row.model_copy(update=kept) for row in rows)
        for name, rows in result.attacks.items()
    }
    worst = tuple(row.model_copy(update=kept) for row in result.worst_case)
    result = result.model_copy(update={"attacks": attacks, "worst_case": worst})
    phase.models[method][0] = changed(phase.models[method][0], result)


def test_one_seed_shows_no_difference_of_the_routing(tmp_path):
    found = results(tmp_path)
    text = answered(found)
    assert text.startswith(
        "Pretrained on Fashion-MNIST: each router decides, and an attack (PGD 10"
    )
    assert "ε = 8/255" in text and "a difference" not in text
    # generated: the change is 0.5 for every method
    assert "leaves 50.0 % (all alike) of its choice of experts in place; " in text
    phase = found.phases["pretrain"]
    result = phase.models["tgr"][0].of(Robustness)
    moved = {
        name: tuple(row.model_copy(update={"routing_change": (0.3, 0.3)}) for row in rows)
        for name, rows in result.attacks.items()
    }
    result = result.model_copy(update={"attacks": moved})
    phase.models["tgr"][0] = changed(phase.models["tgr"][0], result)
    told = "leaves 50.0 % (vmoe) to 70.0 % (tgr) of its choice of experts in place, a difference "
    assert told + "that one seed cannot show; " in answered(found)
    assert text.count(".") - len(re.findall(r"\d\.\d", text)) == 1, "one sentence"


def test_a_shown_lead_is_told_with_its_interval(tmp_path):
    found = results(tmp_path, {"dense": False, "vmoe": True}, phases=["pretrain"])
    with_hits(found, "vmoe", 2)
    assert "vmoe is most accurate under the worst attack, 99.0 % (" in answered(found)


def test_dense_is_never_the_best(tmp_path):
    found = results(tmp_path, phases=["pretrain"])._replace(settings=DENSE)
    with_hits(found, "dense", 0)
    assert found.without_experts == {"dense"}
    assert "under the worst attack no mixture is as accurate as dense, 100" in answered(found)
    cells = table(found, found.phases["pretrain"]).cells
    cell = cells["dense"]["accuracy_worst_case"]
    assert cell.leads and not cell.marked
    assert not any(row["accuracy_worst_case"].marked for row in cells.values())


def test_a_router_that_learned_nothing_is_a_control(tmp_path):
    settings = "methods: {dense: {}, vmoe: {router: {kind: hash}}, tgr: {router: {kind: x}}}"
    found = results(tmp_path, phases=["pretrain"])._replace(settings=settings)
    assert found.controls == {"vmoe"}
    text = answered(found)
    assert "vmoe" not in text and "the router of tgr decides" in text


def test_two_methods_and_several_seeds(tmp_path):
    found = results(tmp_path, {"vmoe": True, "tgr": True}, seeds=(0, 1, 2), phases=["pretrain"])
    text = answered(found)
    assert "every other" not in text and "one seed" not in text


def test_what_was_not_measured_names_its_stage(tmp_path):
    found = results(tmp_path, phases=["pretrain"])
    for seeds in found.phases["pretrain"].models.values():
        left = {kind: one for kind, one in seeds[0].results.items() if kind is Outcome}
        seeds[0] = seeds[0]._replace(results=left)
    page = page_of(found, ())
    notes = page.overviews[0].notes
    assert "Not measured: the score under attack (the stage robustness would)." in notes
    assert len(page.overviews[0].pictures) == 1, "no scatter"
    # agreement over the epochs stands in for the routing under attack
    assert "first experts are settled halfway through training" in page.answer


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_errors_have_their_unit(tmp_path, seeds):
    text = answered(results_of_ages(tmp_path, seeds))
    assert text.startswith("Pretrained on Small cohort: ")
    assert re.search(r"errs? l[a-z]+ .* years[;.]", text) and "accurate" not in text
    assert "worst case" not in text


def test_claims_are_counted():
    shown = claimed(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89])
    asked = [claim(), claim(better="lower"), claim(metric="test_accuracy")]
    text = answer_of_claims(evaluate(asked, shown))
    assert text.startswith("Of 3 claims that were tested here, 1 holds (prc against vmoe: Match")
    assert "1 is contradicted" in text and "1 stays open" in text
    one = answer_of_claims(evaluate(asked[:1], shown))
    assert one.startswith("The one claim that was tested here holds (prc against vmoe: ")


def test_pictures_hold_their_data(tmp_path):
    found = results(tmp_path, phases=["pretrain"])
    phase = found.phases["pretrain"]
    known = quantities(phase, table(found, phase))
    scatter, rows = (one.figure for one in pictures(phase, known))
    for figure in (scatter, rows):
        for axes in figure.axes:
            (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
            for line in axes.lines:
                assert all(left <= x <= right for x in line.get_xdata())
                assert all(low <= y <= high for y in line.get_ydata())
    names = {text.get_text() for text in scatter.axes[0].texts}
    assert names == set(phase.models), "every point has its name"
    limits = []
    hold(lambda first, last: limits.append((first, last)), [0.99, 1.0], "share")
    assert limits[0][1] <= 1.03


def test_words_explain_columns():
    assert word_of("imed_rotation_5") == "IMED" and word_of("mce") == "mCE"
    assert word_of("accuracy_worst_case") == word_of("attacked_mae_worst_case") == "worst case"
    assert word_of("test_accuracy") == ""
    assert all("\n" not in text and not text.endswith(".") for text in WORDS.values())


def test_the_glossary_has_the_same_words():
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = {row[0]: row[1] for row in cells if len(row) == 2}
    assert {name: rows[name] for name in WORDS} == WORDS


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
        outcome = seeds[0].of(Outcome).model_copy(update={"task": task, "confusion": counts})
        seeds[0] = changed(seeds[0], outcome)
    found.phases["pretrain"] = phase._replace(task=task)
    section = page_of(found, ()).sections[0]
    block = next(one for one in section.blocks if one.title == "Confusion of classes")
    assert block.finding == "class 7 is taken for class 8 most often (25\u00a0%, mean over methods)"
    assert [len(tile.lines) for tile in block.tiles] == [1, 1, 1]
    assert answer(phase, "x", quantities(phase, table(found, phase)), ())
