"""``stages.predict``: new volumes of a folder, with and without participants.tsv, like and unlike
the training data.
"""

import json
import warnings

import nibabel
import numpy as np
import pytest
import torch

from moecore.brain.ages import Ages, fit
from moecore.brain.calibrated_ages import write
from moecore.brain.measured_ages import measured
from moecore.brain.new_ages import calibrator_of
from moecore.brain.new_ages import predict_ages as predict
from moecore.brain.new_volumes import find_volumes
from moecore.brain.prediction_table import read_predictions
from moecore.core.files import UserError
from moecore.measure.calibrators.linear import FittedLinear, Linear
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.predict import predictions
from moecore.training.artifacts import save_model
from stages.predict import main
from tests.volumes import leaning, write_cohort


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model and its calibrator, in the places of the pipeline."""
    root = tmp_path_factory.mktemp("trained")
    data = write_cohort(root / "data", numbers={"train": 20, "validation": 12, "test": 9})
    torch.manual_seed(0)
    target = root / "artifacts/pretrain/dense/0"
    target.mkdir(parents=True)
    model = Vit3d(patch=8, width=16, depth=1, heads=2).build(ImageSpec.from_card(data.card), None)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    save_model(target, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ages = Ages.of(data, leaning(data), target / "model.safetensors")
        line = fit(ages, Linear(), None)
        write(
            calibrator_of(target),
            ages,
            line,
            measured(ages, line, "train", 100),
            "pretrain/dense/0",
        )
    return target, data, model


def nifti(path, volume):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(
        nibabel.Nifti1Image(np.asarray(volume, np.float32), np.diag([3.0, 3.0, 3.0, 1.0])), path
    )


def brain(edge=10, gain=100.0, seed=0):
    """A skull-stripped cube of 3 mm voxels, as those of the cohort."""
    image = np.zeros((16, 16, 16))
    start = (16 - edge) // 2
    image[(slice(start, start + edge),) * 3] = gain * (
        0.6 + np.random.default_rng(seed).normal(0, 0.05, (edge,) * 3)
    )
    return image


def test_a_bids_folder_with_ages(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", "1")
    target, data, model = trained
    for number in (1, 2, 3):
        nifti(
            tmp_path / f"sub-{number}/ses-a/anat/sub-{number}_ses-a_T1w.nii.gz", brain(seed=number)
        )
    (tmp_path / "participants.tsv").write_text(
        "participant_id\tage\tsex\tsite\nsub-1\t60.5\tF\tsite0\nsub-2\tn/a\tmale\telsewhere\n"
    )
    with pytest.warns(UserWarning, match="pooled line stands in"):
        predict(target, tmp_path, tmp_path / "out.csv")
    rows = read_predictions(tmp_path / "out.csv")
    assert [
        (row["participant_id"], row["session_id"], row["split"], row["age"], row["sex"])
        for row in rows
    ] == [
        ("sub-1", "ses-a", "new", "60.5000", "F"),
        ("sub-2", "ses-a", "new", "", "M"),
        ("sub-3", "ses-a", "new", "", ""),
    ]
    fitted = FittedLinear.from_json((calibrator_of(target) / "calibrator.json").read_text())
    for row, group in zip(rows, ("F", "M", "pooled"), strict=True):
        raw = float(row["predicted_age"])
        assert (
            float(row["predicted_age_pooled"]) == pytest.approx(fitted.pooled.invert(raw), abs=1e-3)
            and row["calibration_group"] == group
        )
        line = fitted.groups.get(group, fitted.pooled)
        assert float(row["predicted_age_sex_specific"]) == pytest.approx(line.invert(raw), abs=1e-3)
    assert (
        float(rows[0]["brain_pad_raw"])
        == pytest.approx(float(rows[0]["predicted_age"]) - 60.5, abs=1e-3)
        and rows[1]["brain_pad_raw"] == ""
    )
    assert (
        "site elsewhere not in training" in rows[1]["qc_flags"]
        and "site" not in rows[0]["qc_flags"]
    )


def test_a_prediction_is_the_models_for_the_prepared_volume(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", "1")
    target, _, model = trained
    image = brain()
    nifti(tmp_path / "one.nii.gz", image)
    nifti(tmp_path / "brighter.nii.gz", 7 * image)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = predict(target, tmp_path, tmp_path / "out.csv").rows
    inside = image[image > 0].astype(np.float32)
    low, high = np.percentile(inside, (1, 99))
    made = np.zeros_like(image)
    made[image > 0] = 0.01 + 0.99 * np.clip((inside - low) / (high - low), 0, 1)
    said = predictions(model.eval(), made[None, None].astype(np.float16), 1, routing=False)[0][0, 0]
    assert [row.participant_id for row in rows] == ["brighter", "one"]
    assert rows[1].predicted_age == pytest.approx(float(said), abs=1e-2)
    assert rows[0].predicted_age == pytest.approx(rows[1].predicted_age, abs=1e-2)


def test_volumes_unlike_training_are_flagged(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOECORE_THREADS", "1")
    nifti(tmp_path / "in/small.nii.gz", brain(edge=6))
    main([str(trained[0]), str(tmp_path / "in"), "--out", str(tmp_path / "out.csv")])
    told, row = capsys.readouterr(), read_predictions(tmp_path / "out.csv")[0]
    # 6³ · 27 / 1000
    assert "brain_ml 5.832 outside training 27 to 27" in row["qc_flags"]
    assert "1 of 1 volumes are unlike those of the training" in told.out
    assert "brain_ml 5.832" in told.out


def test_volumes_that_cannot_be_used_keep_a_line(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOECORE_THREADS", "1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.nii.gz").write_bytes(b"no image")
    nifti(tmp_path / "in/b.nii.gz", np.zeros((16, 16, 16)))
    with pytest.raises(UserError, match=r"(?s)a\.nii\.gz.*b\.nii\.gz.*none of 2 volumes"):
        predict(trained[0], tmp_path / "in", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()
    nifti(tmp_path / "in/c.nii.gz", brain())
    with pytest.raises(SystemExit) as end:
        main([str(trained[0]), str(tmp_path / "in"), "--out", str(tmp_path / "out.csv")])
    assert end.value.code == 3
    rows = {row["participant_id"]: row for row in read_predictions(tmp_path / "out.csv")}
    assert rows["c"]["predicted_age"] and rows["c"]["error"] == ""
    assert rows["a"]["predicted_age"] == "" and "a.nii.gz" in rows["a"]["error"]
    told = capsys.readouterr().err
    assert "2 of 3 files have no prediction" in told and "b.nii.gz" in told
    page = (tmp_path / "out.html").read_text()
    assert page.count("<canvas") == 3 and "b.nii.gz" in page  # three slices of one volume


def test_the_calibrator_of_another_model_is_refused(trained, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match="allowed: the calibrator of this very model"):
        predict(tmp_path, tmp_path, tmp_path / "out.csv", calibrator_of(trained[0]))


def test_what_is_found(tmp_path):
    with pytest.raises(UserError, match="no volumes; allowed"):
        find_volumes(tmp_path)
    nifti(tmp_path / "p1.nii.gz", brain())
    nifti(tmp_path / "p1_mask.nii.gz", brain() > 0)
    nifti(tmp_path / "p2.nii", brain())
    found = find_volumes(tmp_path)
    assert [(one.path.name, one.mask and one.mask.name) for one in found] == [
        ("p1.nii.gz", "p1_mask.nii.gz"),
        ("p2.nii", None),
    ]
    nifti(tmp_path / "sub-9/anat/sub-9_T1w.nii.gz", brain())
    nifti(tmp_path / "sub-9/anat/sub-9_desc-brain_mask.nii.gz", brain() > 0)
    (one,) = find_volumes(tmp_path)
    assert (
        one.subject["participant_id"] == "sub-9"
        and one.mask.name == "sub-9_desc-brain_mask.nii.gz"
        and one.subject["session_id"] == ""
    )


def test_a_bad_table_is_told_whole(tmp_path):
    nifti(tmp_path / "p1.nii.gz", brain())
    (tmp_path / "participants.tsv").write_text("participant_id\tage\tsex\np1\told\tF\np2\t50\tX\n")
    with pytest.raises(UserError, match=r"(?s)age is 'old'.*sex is 'X'"):
        find_volumes(tmp_path)
    (tmp_path / "participants.tsv").write_text("id\np1\n")
    with pytest.raises(UserError, match="lacks the column participant_id"):
        find_volumes(tmp_path)


def test_the_reference_is_json(trained):
    assert (
        json.loads((calibrator_of(trained[0]) / "reference.json").read_text())["interval"]["level"]
        == 0.9
    )
