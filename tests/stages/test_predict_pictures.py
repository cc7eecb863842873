"""``moecore predict`` on folders of pictures: any size and mode, and all that may be wrong."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moecore.core.files import UserError
from moecore.data.files.decode import decode_image
from moecore.measure.calibrators.temperature import FittedTemperature
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoE
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.run.predictions import Given, predict_folder
from moecore.tasks.classification import Classification
from moecore.training.artifacts import load_model, save_model
from stages.predict import main
from tests.browser import LOOKS, clipped, opened
from tests.volumes import write_classes

ROOT = Path(__file__).resolve().parents[2]
NASTY = "<img src=x onerror=alert(1)>"


def trained(folder: Path, channels: int = 3, experts: bool = True) -> Path:
    """A model with random weights, in the place of the pipeline."""
    torch.manual_seed(0)
    task = Classification(classes=("clover", NASTY, "sky"))
    mean = (0.5,) * channels
    image = ImageSpec(channels=channels, size=16, task=task, mean=mean, std=mean)
    moe = MoE(router=NoisyTopK(k=2), experts=Mlp(number=4), blocks=(0, 1)) if experts else None
    target = folder / "artifacts/finetune/vmoe/0"
    save_model(target, Vit(patch=4, width=16, depth=2, heads=2).build(image, moe))
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


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
    main([str(model), str(pictures), "--out", str(tmp_path / "out.csv"), "--batch", "5"])
    rows = rows_of(tmp_path / "out.csv")
    assert [row["file"] for row in rows] == sorted(
        path.relative_to(pictures).as_posix() for path in pictures.rglob("*.*")
    )
    loaded = load_model(model)
    for row in rows:
        pixels = decode_image(pictures / row["file"], 16, 3)
        with torch.inference_mode():
            probs = loaded(torch.from_numpy(pixels.copy())[None] / 255).prediction.softmax(1)[0]
        names = loaded.image.task.classes
        assert [float(row[f"p({name})"]) for name in names] == pytest.approx(
            probs.tolist(), abs=1e-5
        )
        assert row["prediction"] == names[int(probs.argmax())] and row["error"] == ""
        assert float(row["probability"]) == pytest.approx(float(probs.max()), abs=1e-5)
    told = capsys.readouterr().out
    assert "probabilities are not calibrated: there is no " in told
    assert "transparent pixels stand on white" in told and "24 files" in told


def test_probabilities_are_calibrated_where_there_is_a_calibrator(pictures, tmp_path, capsys):
    model = trained(tmp_path)
    main([str(model), str(pictures), "--out", str(tmp_path / "plain.csv")])
    folder = tmp_path / "artifacts/calibrate/finetune/vmoe/0"
    folder.mkdir(parents=True)
    (folder / "calibrator.json").write_text(FittedTemperature(temperature=0.25).to_json())
    main([str(model), str(pictures), "--out", str(tmp_path / "sharp.csv")])
    assert "probabilities are calibrated: temperature 0.25" in capsys.readouterr().out
    plain, sharp = rows_of(tmp_path / "plain.csv"), rows_of(tmp_path / "sharp.csv")
    assert [row["prediction"] for row in plain] == [row["prediction"] for row in sharp]
    for one, other in zip(plain, sharp, strict=True):
        assert float(other["probability"]) > float(one["probability"])


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
    main_again = predict_folder(Given(model, pictures, pictures / "out.csv"))
    assert main_again == predict_folder(Given(model, pictures, pictures / "out.csv")) == 5


def test_only_bad_files_are_a_table_too(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/notes.txt").write_text("what I saw")
    assert predict_folder(Given(model, tmp_path / "in", tmp_path / "out.csv")) == 1
    [row] = rows_of(tmp_path / "out.csv")
    assert row["error"].startswith("cannot identify image file")


def test_alpha_stands_on_white_and_16_bits_are_scaled(tmp_path):
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
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
        (("nowhere", "in"), "nowhere: no such folder; MODEL is the folder of a trained model"),
        (("in", "in"), "in: not a trained model, lacks model.json and model.safetensors"),
        (("artifacts", "in"), "artifacts: not a trained model, .*artifacts/finetune/vmoe/0 is one"),
        (("in/a.txt", "in"), "in/a.txt: a file; MODEL is the folder"),
        (("MODEL", "nowhere"), "nowhere: no such folder; FOLDER is a folder with"),
        (("MODEL", "in/a.txt"), "in/a.txt: a file; FOLDER is a folder with"),
        (("MODEL", "void"), "void: holds no files; FOLDER is a folder with"),
        (("MODEL", "in", "--out", "in"), "in: is a folder; --out is the file to write"),
        (("MODEL", "in", "--out", "in/a.txt/x.csv"), "in/a.txt/x.csv: cannot be written"),
        (("MODEL", "in", "--out", "x.html"), "x.html: the page beside the table has this name"),
        (("MODEL", "in", "--calibrator", "in"), "in/calibrator.json: no such file; --calibrator"),
        (("models:/none@current", "in"), "models:/none@current: no such model in sqlite"),
    ],
)
def test_what_cannot_be_is_one_message_before_anything_runs(words, message, tmp_path, monkeypatch):
    model = trained(tmp_path)
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


def test_the_command_itself(model, pictures, tmp_path):
    command = [sys.executable, "-c", "from moecore.pipeline.cli import app; app()", "predict"]
    done = subprocess.run(
        [*command, str(model), str(pictures), "--out", "there/out.csv"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(rows_of(tmp_path / "there/out.csv")) == 24
    assert (tmp_path / "there/out.html").is_file()


def test_a_model_that_is_damaged_is_named(pictures, tmp_path):
    model = trained(tmp_path)
    (model / "model.json").write_text(json.dumps({"backbone": {"kind": "none"}}))
    with pytest.raises(UserError, match="model.json: not the settings of a model"):
        predict_folder(Given(model, pictures, tmp_path / "out.csv"))
    shutil.rmtree(model)
    with pytest.raises(UserError, match="no such folder; MODEL"):
        predict_folder(Given(model, pictures, tmp_path / "out.csv"))


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_shows_pictures_and_experts(browser, model, pictures, tmp_path, width, scheme):
    spoil(pictures)
    predict_folder(Given(model, pictures, tmp_path / "out.csv"))
    with opened(browser, tmp_path / "out.html", width, scheme) as page:
        assert clipped(page) == []
        assert page.locator("li").count() == 24
        assert page.locator("#failures + table tr").count() == 5
        painted = "canvas => canvas.toDataURL().length"
        canvas = page.locator("canvas").first
        last = canvas.evaluate(painted)
        page.get_by_label("MoE layer 1").check()
        first = canvas.evaluate(painted)
        page.get_by_label("none: the picture alone").check()
        assert canvas.evaluate(painted) < min(first, last)


def test_a_dense_model_says_that_there_is_no_routing(browser, pictures, tmp_path):
    model = trained(tmp_path, channels=1, experts=False)
    assert predict_folder(Given(model, pictures, tmp_path / "out.csv")) == 0
    with opened(browser, tmp_path / "out.html", 1400, "light") as page:
        assert "This model is dense" in page.locator("body").inner_text()
        assert page.locator("input[name=layer]").count() == 0
