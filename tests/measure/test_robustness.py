"""Robustness on the digits, of a sparse and a dense model under every kind of attack."""

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.streams import derived_seed
from moecore.measure import robustness as module
from moecore.measure.base import MeasuredModel, Skipped, read_result
from moecore.measure.robustness import (
    Result,
    Robustness,
    check_attack_settings,
    measure,
    target_on_drawn_images,
)
from moecore.measure.under_attack.curves import measured_curves, worst_case
from moecore.nn.predict import predict_in_batches
from moecore.stages import robustness as stage
from tests.attacks.models import CLASSES, SETS, YEARS
from tests.measure.subjects import (
    MODELS,
    compute_without_cache,
    in_run,
    top_k_mlps,
    train_on_ages,
    write_digits,
    write_models,
)
from tests.volumes import write_cohort

SETTINGS = Robustness(
    images=25,
    epsilons=(0.2, 0.05),
    batch=10,
    audit={"images": 12, "steps": 4},
    attacks=(
        {"kind": "fgsm"},
        {"kind": "pgd", "steps": 4},
        {"kind": "pgd", "steps": 4, "objective": "balance", "group": 10},
        {"kind": "pgd", "steps": 4, "objective": "routing_change"},
        {"kind": "apgd", "steps": 8},
        {"kind": "apgd", "steps": 8, "objective": "dlr"},
    ),
)
NAMES = [
    "fgsm",
    "pgd-4",
    "pgd-balance-10-4",
    "pgd-routing_change-4",
    "apgd-8",
    "apgd-dlr-8",
]
ROWS = len(NAMES) * 3
IDLE = "the model has no MoE layer whose routing could change"
RESULT = "artifacts/measured/robustness/pretrain/vit/0.json"


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """Both models, and the folder they lie in."""
    folder = tmp_path_factory.mktemp("robustness")
    data = write_digits(folder)
    models = write_models(folder, data)
    return folder, {name: MeasuredModel(model, data) for name, model in models.items()}


@pytest.fixture(scope="module")
def results(subjects) -> dict[str, Result]:
    return {
        name: measure(subject, SETTINGS, compute_without_cache)
        for name, subject in subjects[1].items()
    }


def test_a_few_images_are_shown_under_the_strongest_attack(results, subjects):
    for name, found in results.items():
        shown = found.attacked
        last = {one: rows[-1] for one, rows in measured_curves(found.attacks).items()}
        assert last[shown.attack].score == min(row.score for row in last.values())
        assert [row.epsilon for row in shown.rows] == [0, 0.05, 0.2]
        clean, *moved = (row.pictures.array().astype(float) / 255 for row in shown.rows)
        images = target_on_drawn_images(subjects[1][name], SETTINGS).images
        assert np.array_equal(clean * 255, images[[0, 12, 24]])
        for pictures, epsilon in zip(moved, (0.05, 0.2), strict=True):
            assert 0 < np.abs(pictures - clean).max() <= epsilon + 1 / 255


@pytest.mark.parametrize("name", list(MODELS))
def test_every_attack_has_its_curve(results, name):
    found = results[name]
    assert found.images == 25 and list(found.attacks) == NAMES and 0.3 < found.clean_score <= 1
    for rows in measured_curves(found.attacks).values():
        assert [row.epsilon for row in rows] == [0, 0.05, 0.2]
        assert rows[0].score == found.clean_score and rows[0].unchanged_images == 1
        for row in rows:
            assert row.score == int(found.task.decode_scores(row.scores, 25).sum()) / 25
            assert row.low <= row.score <= row.high and row.score <= found.clean_score
            layers = 2 if name == "vit" else 0
            assert len(row.routing_change) == len(row.processing_change) == layers
            assert row.loss > 0
    assert found.attacks["pgd-4"][-1].score < found.clean_score


def test_the_worst_case_is_over_all_attacks(results):
    found = results["vit"]
    for index, row in enumerate(found.worst_case):
        hits = torch.stack(
            [found.task.decode_scores(rows[index].scores, 25) for rows in found.attacks.values()]
        )
        assert torch.equal(found.task.decode_scores(row.scores, 25), hits.all(dim=0))
        assert row.score <= hits.double().mean(dim=1).min() + 1e-9
        assert row.epsilon == [0, 0.05, 0.2][index] and row.low <= row.score <= row.high


def test_routing_change_is_nothing_when_clean_and_most_where_it_is_the_aim(results):
    curves = results["vit"].attacks
    assert all(rows[0].routing_change == (0, 0) for rows in curves.values())
    moved = {name: sum(rows[-1].routing_change) for name, rows in curves.items()}
    assert moved["pgd-routing_change-4"] > moved["pgd-4"] > 0


def test_the_attack_on_routing_is_skipped_for_a_dense_model_and_nothing_else(results):
    curves = results["dense"].attacks
    skipped = {name: rows for name, rows in curves.items() if isinstance(rows, Skipped)}
    assert skipped == {"pgd-routing_change-4": Skipped(skipped=IDLE)}
    balanced = curves["pgd-balance-10-4"][1].loss
    assert balanced == pytest.approx(curves["pgd-4"][1].loss, rel=1e-4)
    assert not [rows for rows in results["vit"].attacks.values() if isinstance(rows, Skipped)]


def test_the_audit_says_why_it_could_not_judge(results):
    sparse, dense = ({line.name: line for line in results[name].audit} for name in MODELS)
    assert list(sparse) == list(dense) and len(sparse) == 7
    assert sparse["deterministic"].holds is True
    assert [name for name, line in sparse.items() if line.holds is None] == []
    assert [name for name, line in dense.items() if line.holds is None] == ["surrogate"]
    assert "no MoE layer" in dense["surrogate"].text


def test_the_batch_plays_no_part(subjects, results):
    found = measure(
        subjects[1]["vit"], SETTINGS.model_copy(update={"batch": 7}), compute_without_cache
    )
    for name, rows in results["vit"].attacks.items():
        assert [row.scores for row in found.attacks[name]] == [row.scores for row in rows]


def test_survivors_alone_have_the_same_accuracy_and_no_routing(subjects, results):
    only = SETTINGS.model_copy(update={"survivors": True})
    found = measure(subjects[1]["vit"], only, compute_without_cache)
    assert found.worst_case == results["vit"].worst_case and found.clean_score < 1
    for name, rows in results["vit"].attacks.items():
        assert [row.scores for row in found.attacks[name]] == [row.scores for row in rows]
        assert all(row.routing_change == row.processing_change == () for row in found.attacks[name])


def test_what_makes_no_sense_for_the_labels_is_refused():
    pgd, dlr = {"kind": "pgd"}, {"kind": "pgd", "objective": "dlr"}

    def settings(*attacks, **changes):
        return Robustness(epsilons=(0.1,), attacks=attacks, **changes)

    check_attack_settings(settings(pgd, dlr, survivors=True), CLASSES)
    check_attack_settings(settings(pgd, survivors=True), SETS)
    for task in (YEARS, SETS):
        with pytest.raises(UserError, match=r"attacks\[1\]: pgd with objective dlr needs"):
            check_attack_settings(settings(pgd, dlr), task)
    with pytest.raises(UserError, match="survivors: found true"):
        check_attack_settings(settings(pgd, survivors=True), YEARS)


def run_stage(subjects, patch, capsys, **changes) -> Result:
    """What the stage writes of the sparse model."""
    settings = SETTINGS.model_dump(mode="json") | changes
    in_run(patch, subjects[0], robustness=settings)
    stage.robustness("pretrain", "vit", 0)
    assert "Audit of the attacks on pretrain vit seed 0" in capsys.readouterr().err
    return read_result(subjects[0] / RESULT, Result, "robustness")


def test_a_killed_stage_attacks_only_what_is_left(subjects, results, monkeypatch, capsys):
    """Stopped at the fifth row and started again, it attacks 21 − 4 rows and ends the same.

    With other settings nothing is taken over.
    """
    rows = []
    row_of = module.measure_attack_at_epsilon

    def stopped(attack, target, clean, epsilon):
        rows.append(epsilon)
        if len(rows) == 5:
            raise KeyboardInterrupt
        return row_of(attack, target, clean, epsilon)

    monkeypatch.setattr(module, "measure_attack_at_epsilon", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_stage(subjects, monkeypatch, capsys)
    assert run_stage(subjects, monkeypatch, capsys) == results["vit"]
    assert len(rows) == 5 + ROWS - 4
    run_stage(subjects, monkeypatch, capsys, batch=7)
    assert len(rows) == 5 + ROWS - 4 + ROWS


ON_AGES = Robustness(
    images=10,
    epsilons=(0.1, 0.02),
    batch=4,
    audit={"images": 6, "steps": 3},
    attacks=(
        {"kind": "fgsm", "inside": True},
        {"kind": "pgd", "steps": 4, "inside": True},
        {"kind": "pgd", "steps": 4},
        {"kind": "apgd", "steps": 4},
        {"kind": "pgd", "steps": 2, "objective": "balance", "group": 5},
        {"kind": "pgd", "steps": 2, "objective": "routing_change"},
    ),
)
AGE_MODELS = {"dense": None, "moe": top_k_mlps()}


@pytest.fixture(scope="module")
def aged(tmp_path_factory) -> dict[str, MeasuredModel]:
    data = write_cohort(tmp_path_factory.mktemp("ages") / "data")
    return {name: MeasuredModel(train_on_ages(data, moe), data) for name, moe in AGE_MODELS.items()}


@pytest.fixture(scope="module")
def aged_results(aged) -> dict[str, Result]:
    return {
        name: measure(subject, ON_AGES, compute_without_cache) for name, subject in aged.items()
    }


@pytest.mark.parametrize("name", list(AGE_MODELS))
def test_errors_under_attack(aged_results, name):
    found = aged_results[name]
    curves = measured_curves(found.attacks)
    for rows in curves.values():
        assert [row.epsilon for row in rows] == [0, 0.02, 0.1]
        assert rows[0].score == pytest.approx(found.clean_score) and rows[0].unchanged_images == 1
        for row in rows:
            assert row.low <= row.score <= row.high
            assert row.score == pytest.approx(np.mean(row.scores)) and len(row.scores) == 10
            worse = [left >= clean for left, clean in zip(row.scores, rows[0].scores, strict=True)]
            assert all(worse), "the clean image lies in every ball"
            assert row.loss <= row.score + 1e-9
            assert len(row.routing_change) == (2 if name == "moe" else 0)
    plain = curves["pgd-4"][-1].score
    inside = curves["pgd-inside-4"][-1].score
    assert plain > inside > found.clean_score + 0.1, "the background is of use to an attack"
    assert found.worst_case == worst_case(curves, found.task, 10)
    skipped = [attack for attack, rows in found.attacks.items() if isinstance(rows, Skipped)]
    assert skipped == ([] if name == "moe" else ["pgd-routing_change-2"])


def test_the_clean_error_is_the_models(aged, aged_results):
    subject = aged["dense"]
    drawn = np.random.default_rng(derived_seed("attacked_images", 0))
    where = np.sort(drawn.permutation(40)[:10])
    test = subject.data.test
    said = predict_in_batches(subject.model, test.images[where], 5)[0][:, 0].numpy()
    errors = np.abs(said - test.labels[where])
    rows = aged_results["dense"].attacks["fgsm-inside"]
    assert rows[0].scores == pytest.approx(errors.tolist(), abs=1e-4)
