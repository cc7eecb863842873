"""Robustness of models that predict ages, on volumes; and the transfer of attacks between them."""

import numpy as np
import pytest
import torch

from moecore.core.streams import seed_of
from moecore.measure.base import Skipped, Subject, at_once, read_result
from moecore.measure.robustness import Result, Robustness, measure
from moecore.measure.transfer import Transfer
from moecore.measure.transfer import measure as measure_transfer
from moecore.measure.under_attack.curves import run_of, worst_case
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.layers.moe import MoE
from moecore.nn.predict import predictions
from tests.cohort import write_cohort

SETTINGS = Robustness(
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
SPARSE = MoE(
    router={"kind": "noisy_top_k", "k": 1},
    experts={"kind": "mlp", "number": 4, "hidden_ratio": 1},
    blocks=[0, 1],
)
MODELS = {"dense": None, "moe": SPARSE}
LINES = [
    "deterministic",
    "zero_gradients",
    "pgd_beats_fgsm",
    "apgd_beats_pgd",
    "chance",
    "more_steps",
    "surrogate",
    "larger_epsilon",
]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    data = write_cohort(tmp_path_factory.mktemp("ages") / "data")
    return {name: Subject(trained(data, moe), data) for name, moe in MODELS.items()}


@pytest.fixture(scope="module")
def results(subjects) -> dict[str, Result]:
    return {name: measure(subject, SETTINGS, at_once) for name, subject in subjects.items()}


def trained(data, moe) -> torch.nn.Module:
    """A model that follows age a little, after a few steps."""
    torch.manual_seed(1)
    backbone = Vit3d(patch=4, width=16, depth=2, heads=2, mlp_ratio=1)
    model = backbone.build(ImageSpec.from_card(data.card), moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    volumes = torch.from_numpy(np.array(data.train.images)).float()
    labels = torch.from_numpy(data.train.labels)
    for _ in range(30):
        loss = (model(volumes).prediction[:, 0] - labels).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("name", list(MODELS))
def test_errors_under_attack(results, name):
    found = results[name]
    curves = run_of(found.attacks)
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
    assert found.score_at_largest_epsilon["pgd-4"] == plain
    assert found.worst_case == worst_case(curves, found.task, 10)
    skipped = [attack for attack, rows in found.attacks.items() if isinstance(rows, Skipped)]
    assert skipped == ([] if name == "moe" else ["pgd-routing_change-2"])


def test_the_clean_error_is_the_models(subjects, results):
    subject = subjects["dense"]
    drawn = np.random.default_rng(seed_of("attacked_images", 0))
    where = np.sort(drawn.permutation(40)[:10])
    test = subject.data.test
    said = predictions(subject.model, test.images[where], 5)[0][:, 0].numpy()
    errors = np.abs(said - test.labels[where])
    rows = results["dense"].attacks["fgsm-inside"]
    assert rows[0].scores == pytest.approx(errors.tolist(), abs=1e-4)


def test_the_audit_is_of_errors(results):
    sparse, dense = (
        {line.name: line.holds for line in results[name].audit} for name in ("moe", "dense")
    )
    assert list(sparse) == LINES and None not in sparse.values()
    assert sparse["deterministic"] is True and sparse["larger_epsilon"] is True
    assert dense["surrogate"] is None


def test_a_result_is_read_back_as_it_was(results, tmp_path):
    (tmp_path / "0.json").write_text(results["moe"].model_dump_json())
    assert read_result(tmp_path / "0.json", Result, "robustness") == results["moe"]


def test_attacks_transfer_between_models_of_ages(subjects):
    models = {name: subject.model for name, subject in subjects.items()}
    settings = Transfer(images=10, epsilon=0.1, attack={"kind": "pgd", "steps": 4})
    found = measure_transfer(models, subjects["dense"].data, settings, at_once)
    direct = {cell.scored_by: cell for cell in found.cells if cell.made_on == cell.scored_by}
    for cell in found.cells:
        worse = direct[cell.scored_by].score.value
        assert cell.difference.value == pytest.approx(cell.score.value - worse)
    assert found.reading.holds is True and found.reading.text.startswith("0 of 2")
