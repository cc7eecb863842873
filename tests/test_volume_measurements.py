"""The stages ``robustness`` and ``routing`` (and ``cost``) on volumes with ages, and the stages that refuse them."""

import json

import numpy as np
import pytest
import torch

from moecore.artifacts import load_model, save_model
from moecore.augmentations import OF_VOLUMES, PRESETS, Augmentation, resolved, two_views
from moecore.backbones.image import ImageSpec
from moecore.backbones.vit3d import Vit3d
from moecore.data.prepared import Prepared, spread
from moecore.data.views import Affine, ViewSettings
from moecore.evaluation.overlays import grid_of, mid_slices, pixels_of
from moecore.evaluation.predict import predictions
from moecore.evaluation.robust_errors import worst_errors
from moecore.files import StageError
from moecore.layers.moe import MoE
from moecore.records import Layout, RoutingRecord
from stages import corruptions, cost, invariance, lipschitz, robustness, routing, stability
from tests.cohort import write_cohort

PARAMS = """\
robustness:
  images: 10
  epsilons: [0.1, 0.02]
  batch: 4
  attacks:
    - {kind: fgsm, inside: true}
    - {kind: pgd, steps: 4, inside: true}
    - {kind: pgd, steps: 4}
    - {kind: apgd, steps: 4}
    - {kind: pgd, steps: 2, objective: balance, group: 5}
    - {kind: pgd, steps: 2, objective: routing_change}
  audit: {images: 6, steps: 3}
  transfer: dense
routing:
  images: 12
  overlays: 3
  views: {shift: 2, flip: true, affine: {degrees: 10}}
  augmentations: [identity, noise, shift, flip, rotation, affine]
  augmentation_images: 6
  sweeps: {k: [1, 2], threshold: [], images: 8}
cost: {batch: 4, rounds: 2, images: 8}
invariance: {}
corruptions: {}
stability: {}
lipschitz: {}
"""
MOE = MoE(router={"kind": "noisy_top_k", "k": 1}, experts={"kind": "mlp", "number": 4, "hidden_ratio": 1}, blocks=[0, 1])
MODELS = {"dense": None, "moe": MOE}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stages ran for a sparse and a dense model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("volumes")
        patch.chdir(folder)
        for name, value in {"MOECORE_TRACKING": "off", "MOECORE_THREADS": "1"}.items():
            patch.setenv(name, value)
        patch.delenv("MOECORE_PARAMS", raising=False)
        (folder / "params.yaml").write_text(PARAMS)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        data = write_cohort(folder / "artifacts/data/pretrain")
        for name, moe in MODELS.items():
            target = folder / "artifacts/pretrain" / name / "0"
            target.mkdir(parents=True)
            save_model(target, trained(data, moe))
            (folder / "artifacts/teacher_router" / name).mkdir(parents=True)
            (folder / "artifacts/teacher_router" / name / "guide.json").write_text('{"needed": false}')
            for stage in (robustness.robustness, routing.routing):
                stage("pretrain", name, 0)
        yield folder


def trained(data: Prepared, moe: MoE | None) -> torch.nn.Module:
    """A model that follows age a little, after a few steps."""
    torch.manual_seed(1)
    model = Vit3d(patch=4, width=16, depth=2, heads=2, mlp_ratio=1).build(ImageSpec.from_card(data.card), moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    volumes, labels = torch.from_numpy(np.array(data.train.images)).float(), torch.from_numpy(data.train.labels)
    for _ in range(30):
        loss = (model(volumes).prediction[:, 0] - labels).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def measured(folder, stage: str, name: str) -> dict:
    return json.loads((folder / f"artifacts/measured/{stage}/pretrain/{name}/0.json").read_text())


@pytest.mark.parametrize("name", list(MODELS))
def test_errors_under_attack(results, name):
    found = measured(results, "robustness", name)
    for rows in (rows for rows in found["attacks"].values() if rows is not None):
        assert [row["epsilon"] for row in rows] == [0, 0.02, 0.1] and rows[0]["mae"] == pytest.approx(found["clean_mae"]) and rows[0]["unchanged_images"] == 1
        for row in rows:
            assert row["low"] <= row["mae"] <= row["high"] and row["mae"] == pytest.approx(np.mean(row["errors"])) and len(row["errors"]) == 10
            assert all(error >= clean for error, clean in zip(row["errors"], rows[0]["errors"], strict=True)), "the clean image lies in every ball"
            assert row["loss"] <= row["mae"] + 1e-9 and len(row["routing_change"]) == (2 if name == "moe" else 0)
    curves = found["attacks"]
    assert curves["pgd-4"][-1]["mae"] > curves["pgd-inside-4"][-1]["mae"] > found["clean_mae"] + 0.1, "the background is of use to an attack"
    assert found["mae_at_largest_epsilon"]["pgd-4"] == curves["pgd-4"][-1]["mae"] and found["worst_case"] == worst_errors(curves)
    assert found["skipped"] == ({} if name == "moe" else {"pgd-routing_change-2": "the model has no MoE layer whose routing could change"})


def test_the_clean_error_is_the_models(results):
    data = Prepared.open(results / "artifacts/data/pretrain")
    model = load_model(results / "artifacts/pretrain/dense/0")
    where = np.sort(np.random.default_rng(0).permutation(40)[:10])
    errors = np.abs(predictions(model, data.test.images[where], 5)[0][:, 0].numpy() - data.test.labels[where])
    rows = measured(results, "robustness", "dense")["attacks"]["fgsm-inside"]
    assert rows[0]["errors"] == pytest.approx(errors.tolist(), abs=1e-4)


def test_the_audit_is_of_errors(results):
    sparse, dense = ({line["name"]: line["holds"] for line in measured(results, "robustness", name)["audit"]} for name in ("moe", "dense"))
    assert list(sparse) == ["deterministic", "zero_gradients", "pgd_beats_fgsm", "apgd_beats_pgd", "larger_epsilon", "chance", "more_steps", "surrogate", "transfer"]
    assert sparse["deterministic"] is True and sparse["larger_epsilon"] is True and None not in sparse.values()
    assert dense["surrogate"] is None and dense["transfer"] is None
    assert (results / "artifacts/history/robustness/pretrain/moe/0/figures/robustness_curve.png").stat().st_size > 2000


def again(results, monkeypatch, old: str, new: str, stage, name="moe") -> None:
    """The stage with one setting changed."""
    monkeypatch.chdir(results)
    monkeypatch.setenv("MOECORE_TRACKING", "off")
    (results / "other.yaml").write_text(PARAMS.replace(old, new, 1))
    monkeypatch.setenv("MOECORE_PARAMS", "other.yaml")
    stage("pretrain", name, 0)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{kind: fgsm, inside: true}", "{kind: square}", r"robustness.attacks\[0\]: square needs classes"),
        ("{kind: apgd, steps: 4}", "{kind: apgd, objective: dlr}", r"robustness.attacks\[3\]: apgd with objective dlr needs classes"),
        ("images: 10\n", "images: 10\n  survivors: true\n", "robustness.survivors: found true"),
    ],
)
def test_what_needs_classes_is_refused(results, monkeypatch, old, new, says):
    with pytest.raises(StageError, match=says):
        again(results, monkeypatch, old, new, robustness.robustness)


@pytest.mark.parametrize("stage", [invariance.invariance, corruptions.corruptions, stability.stability, lipschitz.lipschitz])
def test_stages_of_flat_images_refuse_volumes(results, monkeypatch, stage):
    name = stage.__name__
    with pytest.raises(StageError, match=rf"{name}: data.pretrain has a real target \(age\), and this stage measures flat images with classes"):
        again(results, monkeypatch, "x", "x", stage)


def test_the_cost_of_volumes_is_measured(results, monkeypatch):
    again(results, monkeypatch, "x", "x", cost.cost)
    found = measured(results, "cost", "moe")
    assert found["flops_per_image"] > 0 and found["images_per_second"] > 0


def test_routing_of_volumes(results):
    dense, found = (measured(results, "routing", name) for name in MODELS)
    assert dense["layers"] == [] and found["images"] == 12 and len(found["layers"]) == 2
    rows = {row["name"]: row for row in found["augmentations"]}
    assert list(rows) == ["identity", "noise", "shift", "flip", "rotation", "affine"]
    assert rows["identity"]["match_top1"] == 1 and rows["identity"]["pairs"] == 6 * 64, "every cube of every volume has its partner"
    assert rows["rotation"]["pairs"] < 6 * 64 and 0 < found["match_top1"] <= 1
    for row in found["sweeps"]["k"]:
        assert row["low"] <= row["mae"] <= row["high"] and "accuracy" not in row
    assert (results / "artifacts/history/routing/pretrain/moe/0/figures/expert_overlays.png").stat().st_size > 2000


def test_the_sweeps_own_setting_has_the_models_error(results):
    data, model = Prepared.open(results / "artifacts/data/pretrain"), load_model(results / "artifacts/pretrain/moe/0")
    where = spread(40, 12)[spread(12, 8)]
    errors = np.abs(predictions(model, data.test.images[where], 5)[0][:, 0].numpy() - data.test.labels[where])
    (own,) = [row for row in measured(results, "routing", "moe")["sweeps"]["k"] if row["own"]]
    assert own["k"] == 1 and own["mae"] == pytest.approx(float(errors.mean()), rel=1e-5)


def test_mid_slices_by_hand():
    # One volume of 4 × 2 × 6 voxels in cubes of 2: a grid of 2 × 1 × 3; the middle row of cubes along the last axis holds voxels 2 and 3.
    volume = np.zeros((1, 1, 4, 2, 6), np.float16)
    volume[0, 0, :, :, 3] = np.array([[0.0, 0.2], [0.4, 0.6], [0.8, 1.0], [0.0, 0.0]])  # (right, anterior) of the shown slice
    layout = Layout(special=1, grid=(2, 1, 3), size=(4, 2, 6))
    combine = torch.zeros(1, 7, 5)
    combine[0, 1 + 1, 4], combine[0, 1 + 4, 2] = 1, 1  # cubes (0, 0, 1) and (1, 0, 1); all others: no expert
    record = RoutingRecord(*[combine] * 5)
    found = mid_slices(volume, (record,), layout)
    assert found["shape"] == [1, 1, 2, 4] and found["experts"] == 5
    assert pixels_of(found)[0, 0].tolist() == [[51, 153, 255, 0], [0, 102, 204, 0]], "anterior up, right to the right"
    assert grid_of(found["grids"][0][0]).tolist() == [[4, 2]]
    special = combine.clone()
    special[0, 0] = 9  # the class token's expert is not shown
    assert mid_slices(volume, (RoutingRecord(*[special] * 5),), layout) == found


def test_presets_of_volumes():
    assert set(OF_VOLUMES) == {"identity", "noise", "shift", "flip", "rotation", "affine"}
    assert resolved("affine", volumes=True).views.affine.shear == 0 and resolved("affine").views.affine.shear == 10 and resolved("flip", True) == PRESETS["flip"]
    with pytest.raises(StageError, match="found brightness, which is for flat images; allowed for volumes: identity"):
        resolved("brightness", volumes=True)


def test_noise_leaves_the_background_of_volumes():
    volumes = np.zeros((2, 1, 8, 8, 8), np.float16)
    volumes[:, :, 2:6, 2:6, 2:6] = 0.5
    views = two_views(volumes, Augmentation(name="noise", noise=0.1), 0)
    assert views.images.shape == (4, 1, 8, 8, 8) and views.affines.shape == (4, 4, 4)
    assert (views.images[:, :, 0] == 0).all() and float(views.images[:, :, 2:6, 2:6, 2:6].std()) == pytest.approx(0.1, rel=0.2)
    assert not torch.equal(views.images[0], views.images[2]), "two views of a volume differ"
    moved = two_views(volumes, Augmentation(name="turned", views=ViewSettings(affine=Affine(degrees=20))), 0)
    assert not torch.equal(moved.affines[0], moved.affines[2]) and torch.equal(views.affines[0], torch.eye(4))
