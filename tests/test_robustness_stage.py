"""The stage ``robustness`` end to end on the digits, for a sparse and a dense model, with every kind of attack."""

import json

import numpy as np
import pytest
import torch

from moecore.artifacts import save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.vit import Vit
from moecore.data.digits import Digits
from moecore.evaluation.robust import unpacked
from moecore.files import StageError
from moecore.layers.moe import MoE
from stages import robustness as stage

ATTACKS = """  attacks:
    - {kind: fgsm}
    - {kind: pgd, steps: 4}
    - {kind: pgd, steps: 4, objective: balance, group: 10}
    - {kind: pgd, steps: 4, objective: routing_change}
    - {kind: apgd, steps: 8}
    - {kind: apgd_reference, steps: 8, loss: dlr}
    - {kind: square, queries: 20}
"""
PARAMS = "robustness:\n  images: 25\n  epsilons: [0.2, 0.05]\n  batch: 10\n  seed: 5\n  audit: {images: 12, steps: 4}\n  transfer: vit\n" + ATTACKS
NAMES = ["fgsm", "pgd-4", "pgd-balance-10-4", "pgd-routing_change-4", "apgd-8", "apgd_reference-dlr-8", "square-20"]
MODELS = {"vit": MoE(router={"kind": "noisy_top_k", "k": 1}, experts={"kind": "mlp", "number": 4, "hidden_ratio": 0.5}, blocks=[0, 1]), "dense": None}


def trained(backbone, image, moe, images, labels):
    """A model that is right about most of its images, after a few steps."""
    torch.manual_seed(1)
    model = backbone.build(image, moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(images).prediction, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for both models, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("robustness")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(PARAMS)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        image = ImageSpec.from_card(Digits(size=12, train_limit=200, test_limit=60).prepare(folder / "artifacts/data/pretrain"))
        train = stage.Prepared.open(folder / "artifacts/data/pretrain").train
        images, labels = torch.from_numpy(np.array(train.images)).float() / 255, torch.from_numpy(train.labels[:])
        for name, moe in MODELS.items():
            target = folder / "artifacts/pretrain" / name / "0"
            target.mkdir(parents=True)
            save_model(target, trained(Vit(patch=6, width=16, depth=2, heads=2), image, moe, images, labels))
            stage.robustness("pretrain", name, 0)
        yield folder


def measured(folder, name: str) -> dict:
    return json.loads((folder / f"artifacts/measured/robustness/pretrain/{name}/0.json").read_text())


@pytest.mark.parametrize("name", list(MODELS))
def test_every_attack_has_its_curve(results, name):
    found = measured(results, name)
    assert found["images"] == 25 and list(found["attacks"]) == NAMES and 0.3 < found["clean_accuracy"] <= 1
    for attack, rows in found["attacks"].items():
        if rows is None:
            assert attack in found["skipped"]
            continue
        assert [row["epsilon"] for row in rows] == [0, 0.05, 0.2]
        assert rows[0]["accuracy"] == found["clean_accuracy"] and rows[0]["unchanged_images"] == 1
        for row in rows:
            assert row["correct"] == int(unpacked(row["hits"], 25).sum()) and row["accuracy"] == row["correct"] / 25
            assert row["low"] <= row["accuracy"] <= row["high"] and row["accuracy"] <= found["clean_accuracy"] and row["loss"] > 0
            assert len(row["routing_change"]) == len(row["processing_change"]) == (2 if name == "vit" else 0)
    assert found["attacks"]["pgd-4"][-1]["accuracy"] < found["clean_accuracy"]


def test_the_worst_case_is_over_all_attacks(results):
    found = measured(results, "vit")
    for index, row in enumerate(found["worst_case"]):
        hits = torch.stack([unpacked(rows[index]["hits"], 25) for rows in found["attacks"].values()])
        assert row["correct"] == int(hits.all(dim=0).sum()) <= int(hits.sum(dim=1).min())
        assert row["epsilon"] == [0, 0.05, 0.2][index] and row["low"] <= row["accuracy"] <= row["high"]


def test_routing_change_is_nothing_when_clean_and_most_where_it_is_the_aim(results):
    curves = measured(results, "vit")["attacks"]
    assert all(rows[0]["routing_change"] == [0, 0] for rows in curves.values())
    moved = {name: sum(rows[-1]["routing_change"]) for name, rows in curves.items()}
    assert moved["pgd-routing_change-4"] > moved["pgd-4"] > 0


def test_the_attack_on_routing_is_skipped_for_a_dense_model_and_nothing_else(results):
    found = measured(results, "dense")
    assert found["skipped"] == {"pgd-routing_change-4": "the model has no MoE layer whose routing could change"}
    assert [name for name, rows in found["attacks"].items() if rows is None] == ["pgd-routing_change-4"]
    assert found["attacks"]["pgd-balance-10-4"][1]["loss"] == pytest.approx(found["attacks"]["pgd-4"][1]["loss"], rel=1e-4)
    assert measured(results, "vit")["skipped"] == {}


def test_the_audit_is_kept_and_says_why_it_could_not_judge(results):
    sparse, dense = ({line["name"]: line for line in measured(results, name)["audit"]} for name in ("vit", "dense"))
    assert list(sparse) == list(dense) and len(sparse) == 9 and sparse["deterministic"]["holds"] is True
    assert [name for name, line in sparse.items() if line["holds"] is None] == ["transfer"], "the second model is this one"
    assert [name for name, line in dense.items() if line["holds"] is None] == ["surrogate"] and "no MoE layer" in dense["surrogate"]["text"]
    assert "second model" in dense["transfer"]["text"]


def test_numbers_alone_go_to_the_results(results):
    kept = json.loads((results / "results/robustness/pretrain/dense/0.json").read_text())
    assert set(kept) == {"images", "clean_accuracy", "accuracy_at_largest_epsilon"}
    assert list(kept["accuracy_at_largest_epsilon"]) == [name for name in NAMES if "routing" not in name]
    assert (results / "artifacts/history/robustness/pretrain/vit/0/figures/robustness_curve.png").stat().st_size > 2000


def again(results, monkeypatch, capsys, **changes) -> dict:
    """The result of the sparse model with other settings."""
    kept = (results / "artifacts/measured/robustness/pretrain/vit/0.json").read_text()
    text = PARAMS + "".join(f"  {key}: {value}\n" for key, value in changes.items())
    for key in changes:
        text = text.replace({"batch": "  batch: 10\n", "transfer": "  transfer: vit\n"}.get(key, "\0"), "", 1)
    monkeypatch.chdir(results)
    monkeypatch.setenv("MOECORE_TRACKING", "off")
    (results / "params.yaml").write_text(text)
    try:
        stage.robustness("pretrain", "vit", 0)
        assert "Audit of the attacks on pretrain vit seed 0" in capsys.readouterr().err
        return measured(results, "vit")
    finally:
        (results / "params.yaml").write_text(PARAMS)
        (results / "artifacts/measured/robustness/pretrain/vit/0.json").write_text(kept)


def test_the_batch_plays_no_part(results, monkeypatch, capsys):
    found, expected = again(results, monkeypatch, capsys, batch=7), measured(results, "vit")
    for name, rows in expected["attacks"].items():
        assert [row["hits"] for row in found["attacks"][name]] == [row["hits"] for row in rows]


def test_survivors_alone_have_the_same_accuracy_and_no_routing(results, monkeypatch, capsys):
    found, expected = again(results, monkeypatch, capsys, survivors="true"), measured(results, "vit")
    assert found["worst_case"] == expected["worst_case"] and found["clean_accuracy"] < 1
    for name, rows in expected["attacks"].items():
        assert [row["hits"] for row in found["attacks"][name]] == [row["hits"] for row in rows]
        assert all(row["routing_change"] == row["processing_change"] == [] for row in found["attacks"][name])


def test_a_killed_stage_attacks_only_what_is_left(results, monkeypatch, capsys):
    """Stopped at the fifth row, started again: 21 − 4 rows are attacked, and the result is that of an undisturbed run. With other settings nothing is taken over."""
    rows, row_of = [], stage.row_of

    def stopped(attack, target, clean, epsilon):
        rows.append(epsilon)
        if len(rows) == 5:
            raise KeyboardInterrupt
        return row_of(attack, target, clean, epsilon)

    monkeypatch.setattr(stage, "row_of", stopped)
    with pytest.raises(KeyboardInterrupt):
        again(results, monkeypatch, capsys)
    assert again(results, monkeypatch, capsys) == measured(results, "vit")
    assert len(rows) == 5 + (len(NAMES) * 3 - 4)
    again(results, monkeypatch, capsys, batch=7)
    assert len(rows) == 5 + (len(NAMES) * 3 - 4) + len(NAMES) * 3


def test_a_missing_second_model_is_named(results, monkeypatch, capsys):
    with pytest.raises(StageError, match="artifacts/pretrain/absent/0"):
        again(results, monkeypatch, capsys, transfer="absent")
