"""``moecore predict`` on folders of volumes and pictures, with all that may be wrong."""

import csv
import os
import re
import warnings
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from moecore.backbones import Vit, Vit3d
from moecore.brain.age_calibration import write_calibration_folder
from moecore.brain.age_correction import ModelAges, fit_calibrator, summarize_age_errors
from moecore.brain.age_predictions import read_predictions
from moecore.core import arrays_as_text, config
from moecore.core.files import UserError, to_jsonable, write_json
from moecore.data.files.decode import decode_image
from moecore.measure.calibrators.linear import FittedLinesByGroup, Linear
from moecore.measure.calibrators.temperature import FittedTemperature
from moecore.measure.values import Found, Value
from moecore.nn.experts.mlp import Mlp
from moecore.nn.predict import predict_in_batches
from moecore.parts import Classification, ImageSpec, MoESettings
from moecore.pipeline.predict_cli import main
from moecore.predict import folder_predictions as module
from moecore.predict.folder_predictions import write_age_predictions as predict
from moecore.predict.model_quality import calibrator_folder
from moecore.routers import NoisyTopK, Told
from moecore.training.artifacts import load_model, save_model
from moecore.training.outcome import SCORE_FILE, ModelScore
from tests.browser import clipped, opened
from tests.data.making import leaning, write_classes, write_cohort
from tests.measure.test_truth import subject as measured_on_dialects
from tests.tasks.test_classification import MOSAIC


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
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
        ages = ModelAges.of(data, leaning(data), target / "model.safetensors")
        line = fit_calibrator(ages, Linear(), None)
        errors = summarize_age_errors(ages, line)
        write_calibration_folder(calibrator_folder(target), ages, line, errors, "pretrain/dense/0")
    return target, data, model


def nifti(path, volume):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.asarray(volume, np.float32), np.diag([3.0, 3, 3, 1])), path)


def brain(edge=10, gain=100.0, seed=0):
    """A skull-stripped cube of 3 mm voxels, as those of the cohort."""
    image = np.zeros((16, 16, 16))
    start = (16 - edge) // 2
    noise = np.random.default_rng(seed).normal(0, 0.05, (edge,) * 3)
    image[(slice(start, start + edge),) * 3] = gain * (0.6 + noise)
    return image


def test_a_bids_folder_with_ages(trained, tmp_path):
    target, data, model = trained
    for number in (1, 2, 3):
        place = tmp_path / f"sub-{number}/ses-a/anat"
        nifti(place / f"sub-{number}_ses-a_T1w.nii.gz", brain(seed=number))
    (tmp_path / "participants.tsv").write_text(
        "participant_id\tage\tsex\tsite\nsub-1\t60.5\tF\tsite0\nsub-2\tn/a\tmale\telsewhere\n"
    )
    with pytest.warns(UserWarning, match="pooled line is used"):
        predict(target, tmp_path, tmp_path / "out.csv")
    rows = read_predictions(tmp_path / "out.csv")
    keys = ("participant_id", "session_id", "split", "age", "sex")
    said = [",".join(row[key] for key in keys) for row in rows]
    assert said == ["sub-1,ses-a,new,60.5000,F", "sub-2,ses-a,new,,M", "sub-3,ses-a,new,,"]
    path = calibrator_folder(target) / "calibrator.json"
    fitted = config.read_json_settings(path, FittedLinesByGroup, "a calibrator")
    for row, group in zip(rows, ("F", "M", "pooled"), strict=True):
        raw = float(row["predicted_age"])
        pooled = pytest.approx(fitted.pooled.invert(raw), abs=1e-3)
        assert float(row["predicted_age_pooled"]) == pooled and row["calibration_group"] == group
        line = fitted.groups.get(group, fitted.pooled)
        assert float(row["predicted_age_sex_specific"]) == pytest.approx(line.invert(raw), abs=1e-3)
    pad = pytest.approx(float(rows[0]["predicted_age"]) - 60.5, abs=1e-3)
    assert float(rows[0]["brain_pad_raw"]) == pad and rows[1]["brain_pad_raw"] == ""
    assert "site elsewhere not in training" in rows[1]["qc_flags"]
    assert "site" not in rows[0]["qc_flags"]


def test_a_prediction_is_the_models_for_the_prepared_volume(trained, tmp_path):
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
    volume = made[None, None].astype(np.float16)
    said = predict_in_batches(model.eval(), volume, 1, routing=False)[0][0, 0]
    assert [row.participant_id for row in rows] == ["brighter", "one"]
    assert rows[1].predicted_age == pytest.approx(float(said), abs=1e-2)
    assert rows[0].predicted_age == pytest.approx(rows[1].predicted_age, abs=1e-2)


def test_volumes_unlike_training_are_flagged(trained, tmp_path, capsys):
    nifti(tmp_path / "in/small.nii.gz", brain(edge=6))
    with pytest.raises(SystemExit, match="^0$"):
        main([str(trained[0]), str(tmp_path / "in"), "--out", str(tmp_path / "out.csv")])
    told, row = capsys.readouterr(), read_predictions(tmp_path / "out.csv")[0]
    # 6³ · 27 / 1000
    assert "brain_ml 5.832 outside training 27 to 27" in row["qc_flags"]
    assert "1 of 1 volumes are unlike the training volumes" in told.out
    assert "brain_ml 5.832" in told.out


def test_volumes_that_cannot_be_used_keep_a_line(trained, tmp_path, capsys):
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
        predict(tmp_path, tmp_path, tmp_path / "out.csv", calibrator_folder(trained[0]))


def test_what_is_found(tmp_path):
    with pytest.raises(UserError, match="no volumes; allowed"):
        module.find_volumes(tmp_path)
    nifti(tmp_path / "p1.nii.gz", brain())
    nifti(tmp_path / "p1_mask.nii.gz", brain() > 0)
    nifti(tmp_path / "p2.nii", brain())
    found = module.find_volumes(tmp_path)
    masks = [(one.path.name, one.mask and one.mask.name) for one in found]
    assert masks == [("p1.nii.gz", "p1_mask.nii.gz"), ("p2.nii", None)]
    nifti(tmp_path / "sub-9/anat/sub-9_T1w.nii.gz", brain())
    nifti(tmp_path / "sub-9/anat/sub-9_desc-brain_mask.nii.gz", brain() > 0)
    (one,) = module.find_volumes(tmp_path)
    assert (one.subject["participant_id"], one.subject["session_id"]) == ("sub-9", "")
    assert one.mask.name == "sub-9_desc-brain_mask.nii.gz"


def test_a_bad_table_is_told_whole(tmp_path):
    nifti(tmp_path / "p1.nii.gz", brain())
    (tmp_path / "participants.tsv").write_text("participant_id\tage\tsex\np1\told\tF\np2\t50\tX\n")
    with pytest.raises(UserError, match=r"(?s)age is 'old'.*sex is 'X'"):
        module.find_volumes(tmp_path)
    (tmp_path / "participants.tsv").write_text("id\np1\n")
    with pytest.raises(UserError, match="lacks the column participant_id"):
        module.find_volumes(tmp_path)


ROOT = Path(__file__).resolve().parents[2]
NASTY = "<img src=x onerror=alert(1)>"


def random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    task = Classification(classes=("clover", NASTY, "sky"))
    image = ImageSpec(channels=3, size=16, task=task, mean=(0.5,) * 3, std=(0.5,) * 3)
    moe = MoESettings(router=NoisyTopK(k=2), experts=Mlp(number=4), blocks=(0, 1))
    target = folder / "artifacts/finetune/vmoe/0"
    save_model(target, Vit(patch=4, width=16, depth=2, heads=2).build(image, moe))
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pictures(tmp_path) -> Path:
    write_classes(tmp_path / "pictures", 8)
    return tmp_path / "pictures"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", "1")


def rows_of(table: Path) -> list[dict[str, str]]:
    with open(table, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_every_size_and_mode_gets_the_models_own_answer(model, pictures, tmp_path, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main([str(model), str(pictures), "--out", str(tmp_path / "out.csv"), "--batch", "5"])
    rows = rows_of(tmp_path / "out.csv")
    files = sorted(path.relative_to(pictures).as_posix() for path in pictures.rglob("*.*"))
    assert [row["file"] for row in rows] == files
    loaded = load_model(model)
    for row in rows:
        pixels = decode_image(pictures / row["file"], 16, 3)
        with torch.inference_mode():
            probs = loaded(torch.from_numpy(pixels.copy())[None] / 255).prediction.softmax(1)[0]
        names = loaded.image.task.classes
        assert [float(row[f"p({n})"]) for n in names] == pytest.approx(probs.tolist(), abs=1e-5)
        assert row["prediction"] == names[int(probs.argmax())] and row["error"] == ""
        assert float(row["probability"]) == pytest.approx(float(probs.max()), abs=1e-5)
    told = capsys.readouterr().out
    assert "how good this model is was not measured: there is no " in told
    assert "probabilities are not calibrated: there is no " in told
    assert "transparent pixels are white" in told and "24 files" in told


def test_probabilities_are_calibrated_where_there_is_a_calibrator(pictures, tmp_path, capsys):
    model = random_model(tmp_path)
    with pytest.raises(SystemExit, match="^0$"):
        main([str(model), str(pictures), "--out", str(tmp_path / "plain.csv")])
    folder = tmp_path / "artifacts/calibrate/finetune/vmoe/0"
    folder.mkdir(parents=True)
    (folder / "calibrator.json").write_text(FittedTemperature(temperature=0.25).model_dump_json())
    limits = {"value": 0.9, "low": 0.85, "high": 0.95}
    score = ModelScore(data="Digits", test_score=limits, test_count=1200)
    (model / SCORE_FILE).write_text(score.model_dump_json())
    error = Found(values=[Value(metric="ece_after", value=0.02, low=0.01, high=0.03)], facts={})
    write_json(tmp_path / "artifacts/measured/calibrate/finetune/vmoe/0.json", to_jsonable(error))
    with pytest.raises(SystemExit, match="^0$"):
        main([str(model), str(pictures), "--out", str(tmp_path / "sharp.csv")])
    told = capsys.readouterr().out
    assert "probabilities are calibrated: temperature 0.25" in told
    said = "ccuracy of this model: 90.0 % (85.0 – 95.0) on 1,200 test items of Digits; expected "
    said += "calibration error after calibration: 0.020 (0.010 – 0.030)"
    assert said in told and said in (tmp_path / "sharp.html").read_text(encoding="utf-8")
    (model / SCORE_FILE).write_text("{}")
    with pytest.raises(SystemExit, match="score.json: not the score of a model"):
        main([str(model), str(pictures), "--out", str(tmp_path / "damaged.csv")])
    plain, sharp = rows_of(tmp_path / "plain.csv"), rows_of(tmp_path / "sharp.csv")
    assert [row["prediction"] for row in plain] == [row["prediction"] for row in sharp]
    for one, other in zip(plain, sharp, strict=True):
        assert float(other["probability"]) > float(one["probability"])


def test_of_a_mosaic_each_cell_has_its_answer(pictures, tmp_path, capsys):
    """Probabilities are those of the model, cell by cell; the truth's channel is not asked for."""
    torch.manual_seed(0)
    image = MOSAIC.model_copy(update={"channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3})
    moe = MoESettings(router=NoisyTopK(k=1), experts=Mlp(number=4), blocks=(0,))
    model = Vit(patch=4, width=16, depth=1, heads=2, pooling="mean").build(image, moe).eval()
    save_model(tmp_path / "model", model)
    table = tmp_path / "out.csv"
    with pytest.raises(SystemExit, match="^0$"):
        main([str(tmp_path / "model"), str(pictures), "--out", str(table)])
    row = rows_of(table)[0]
    pixels = torch.from_numpy(decode_image(pictures / row["file"], 8, 3).copy())[None]
    with torch.inference_mode():
        probs = model(pixels / 255).prediction.view(4, 3).softmax(dim=1)
    names = [f"p({name}) of cell {cell}" for cell in (1, 2, 3, 4) for name in "abc"]
    assert [float(row[name]) for name in names] == pytest.approx(probs.flatten().tolist(), abs=1e-5)
    answers = ", ".join("abc"[best] for best in probs.argmax(dim=1))
    assert (row["prediction"], row["probability"], row["error"]) == (answers, "", "")
    assert f"{answers}</" in table.with_suffix(".html").read_text(encoding="utf-8")


def test_a_model_that_is_told_the_truth_has_no_pictures(pictures, tmp_path):
    save_model(tmp_path / "told", measured_on_dialects(Told()).model)
    request = module.PredictionRequest(tmp_path / "told", pictures, tmp_path / "out.csv")
    with pytest.raises(UserError, match="is routed by the truth, which pictures do not say"):
        module.predict_folder(request)
    assert not request.out.exists()


def spoil(folder: Path) -> set[str]:
    """Files that are no whole pictures, beside good ones; returns their names."""
    whole = next(folder.rglob("*.png")).read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "notes.txt").write_text("what I saw")
    (folder / "words.png").write_text("no picture")
    Image.new("F", (5, 5)).save(folder / "float.tif")
    (folder / ".hidden.png").write_text("no picture")
    return {"half.png", "empty.jpg", "notes.txt", "words.png", "float.tif"}


def test_bad_files_keep_their_rows_and_are_named(model, pictures, tmp_path, capsys):
    bad = spoil(pictures)
    with pytest.raises(SystemExit) as end:
        main([str(model), str(pictures), "--out", str(tmp_path / "out.csv")])
    assert end.value.code == 3
    rows = rows_of(tmp_path / "out.csv")
    assert {row["file"] for row in rows if row["error"]} == bad
    assert all(row["prediction"] == "" for row in rows if row["error"])
    assert sum(row["error"] == "" for row in rows) == 24
    lines = capsys.readouterr().err.splitlines()
    assert {line.split(": ")[0] for line in lines[:-1] if ": " in line} >= bad
    assert lines[-1].startswith("5 of 29 files have no prediction")
    request = module.PredictionRequest(model, pictures, pictures / "out.csv")
    assert module.predict_folder(request) == module.predict_folder(request) == 5


def test_links_out_of_the_folder_and_odd_names_keep_their_rows(model, pictures, tmp_path, capsys):
    one = next(pictures.rglob("*.png"))
    (tmp_path / "secret.png").write_bytes(one.read_bytes())
    (pictures / "out.png").symlink_to(tmp_path / "secret.png")
    (pictures / "dead.png").symlink_to(pictures / "nothing")
    (pictures / "itself.png").symlink_to(pictures / "itself.png")
    (pictures / "=1+1.png").write_bytes(one.read_bytes())
    (pictures / "in.png").symlink_to(one)
    (pictures / "two\nlines.png").write_bytes(one.read_bytes())
    Path(pictures, os.fsdecode(b"\xff.png")).write_bytes(one.read_bytes())
    assert (
        module.predict_folder(module.PredictionRequest(model, pictures, tmp_path / "out.csv")) == 3
    )
    rows = {row["file"]: row for row in rows_of(tmp_path / "out.csv")}
    assert "found 'out.png', which leads out of this folder" in rows["out.png"]["error"]
    assert "No such file" in rows["dead.png"]["error"] and rows["itself.png"]["error"]
    assert "'=1+1.png" in rows, "a spreadsheet would compute it"
    expected = {name for name, row in rows.items() if row["prediction"]}
    assert {"in.png", r"two\nlines.png", r"\udcff.png"} <= expected


def test_volumes_that_lead_out_of_their_folder(trained, tmp_path):
    nifti(tmp_path / "away/v.nii.gz", brain())
    for name in ("a", "b"):
        nifti(tmp_path / f"in/{name}.nii.gz", brain())
    (tmp_path / "in/out.nii.gz").symlink_to(tmp_path / "away/v.nii.gz")
    (tmp_path / "in/b_mask.nii.gz").symlink_to(tmp_path / "away/v.nii.gz")
    made = module.find_volumes(tmp_path / "in")
    reference = module.load_age_calibration(calibrator_folder(trained[0]), trained[0]).reference
    said = dict(
        zip((one.path.name for one in made), module.prepare_volumes(made, reference), strict=True)
    )
    assert "found 'out.nii.gz', which leads out of this folder" in said["out.nii.gz"]
    assert "found 'b_mask.nii.gz', which leads out" in said["b.nii.gz"]
    assert said["a.nii.gz"].ndim == 4
    (tmp_path / "in/participants.tsv").write_bytes(b"participant_id\tage\na\t\xff\n")
    with pytest.raises(UserError, match="participants.tsv: no table of values between tabs"):
        module.find_volumes(tmp_path / "in")


def test_alpha_stands_on_white_and_16_bits_are_scaled(tmp_path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (decode_image(tmp_path / "clear.png", 4, 3) == 255).all()
    Image.new("RGBA", (4, 4), (200, 100, 0, 128)).save(tmp_path / "half.png")
    half = decode_image(tmp_path / "half.png", 4, 3)[:, 0, 0]
    assert np.abs(half.astype(int) - [227, 177, 127]).max() <= 1  # half of it, half white
    deep = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert decode_image(tmp_path / "deep.png", 2, 1)[0].tolist() == [[0, 100], [200, 255]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "in"), "nowhere: no such folder; MODEL "),
        (("artifacts", "in"), "artifacts: not a trained model, .*artifacts/finetune/vmoe/0 is one"),
        (("MODEL", "in/a.txt"), "in/a.txt: a file; FOLDER "),
        (("MODEL", "void"), "void: holds no files; FOLDER "),
        (("MODEL", "in", "--out", "in"), "in: is a folder; --out "),
        (("MODEL", "in", "--calibrator", "in"), "in/calibrator.json: no such file; --calibrator"),
        (("models:/none@current", "in"), "models:/none@current: no such model in sqlite"),
    ],
)
def test_what_cannot_be_is_one_message_before_anything_runs(words, message, tmp_path, monkeypatch):
    model = random_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    (tmp_path / "in").mkdir()
    (tmp_path / "void").mkdir()
    (tmp_path / "in/a.txt").write_text("words")
    with pytest.raises(SystemExit) as end:
        main([str(model) if word == "MODEL" else word for word in words])
    text = str(end.value.code).replace(f"{tmp_path}/", "")
    assert text.count("\n") == 0
    assert re.match(message, text), text
    assert not (tmp_path / "predictions.csv").exists()


def test_the_page_shows_pictures_and_experts(browser, model, pictures, tmp_path):
    spoil(pictures)
    module.predict_folder(module.PredictionRequest(model, pictures, tmp_path / "out.csv"))
    with opened(browser, tmp_path / "out.html", 390, "dark") as page:
        assert clipped(page) == [] and page.locator("li").count() == 24
        assert page.locator("#failures + table tr").count() == 5
        painted = "canvas => canvas.toDataURL().length"
        canvas = page.locator("canvas").first
        last = canvas.evaluate(painted)
        page.get_by_label("MoE layer 1").check()
        first = canvas.evaluate(painted)
        page.get_by_label("none: the picture alone").check()
        assert canvas.evaluate(painted) < min(first, last)


def test_what_a_spreadsheet_would_run_is_text_and_numbers_stay_as_they_are():
    for text in ("-1.5", "+3e-4", "-inf", "plain", "", "a=b", -2.5, None):
        assert arrays_as_text.escape_spreadsheet_formula(text) == text
    for text in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "-"):
        assert arrays_as_text.escape_spreadsheet_formula(text) == f"'{text}"
