"""A trained model in MLflow: a signature, no pickle, and it loads without this repository."""

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy
import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.run.history import record
from moecore.tasks.classification import Classification
from moecore.tracking.model import model_folder
from moecore.tracking.sync import Importer
from moecore.training.artifacts import load_model, save_model

SCRIPT = """
import sys, mlflow.pyfunc, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.metadata.signature.inputs.to_dict()[0]["tensor-spec"]["shape"])
numpy.save(sys.argv[2], model.predict({"images": numpy.ones((3, 1, 8, 8), "float32")}))
"""


def test_a_model_is_logged_with_its_signature_and_loads(study):
    task = Classification(classes=("x", "y"))
    image = ImageSpec(channels=1, size=8, task=task, mean=(0.5,), std=(0.5,))
    model = Vit(patch=4, width=16, depth=2, heads=2).build(image).eval()
    with record("pretrain", None, method="dense", seed=0) as run:
        run.log(1, {"loss": 1.0})
        save_model("artifacts/pretrain/dense/0", model)
        run.model("artifacts/pretrain/dense/0")
    assert Importer().update().added == 1
    [stored] = study.runs()
    assert stored.info.status == "FINISHED"
    assert stored.data.tags["moecore.model"].endswith("artifacts/pretrain/dense/0")
    [logged] = study.client.search_logged_models([stored.info.experiment_id])
    folder = Path(logged.artifact_location.removeprefix("file://"))
    unsafe = (".pkl", ".pickle", ".pt", ".pth")
    assert not [file for file in folder.rglob("*") if file.suffix in unsafe]

    env = dict(os.environ)
    env.pop("PYTHONPATH", None)  # the logged model brings its code
    command = [sys.executable, "-c", SCRIPT, str(folder), "scores.npy"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(-1, 1, 8, 8)" in done.stdout
    with torch.inference_mode():
        expected = load_model("artifacts/pretrain/dense/0")(torch.ones(3, 1, 8, 8)).prediction
    scores = numpy.load("scores.npy", allow_pickle=False)
    numpy.testing.assert_allclose(scores, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_registered_model_loads_by_its_name(study):
    task = Classification(classes=("x", "y"))
    image = ImageSpec(channels=1, size=8, task=task, mean=(0.5,), std=(0.5,))
    folder = "artifacts/pretrain/dense/0"
    scores = []
    for _ in range(2):
        model = Vit(patch=4, width=16, depth=2, heads=2).build(image).eval()
        torch.nn.init.normal_(model.head.weight)
        with record("pretrain", None, method="dense", seed=0) as run:
            save_model(folder, model)
            run.model(folder)
        Importer().update()
        scores.append(model(torch.ones(3, 1, 8, 8)).prediction.detach())
    name = f"{study.folder.name}.dense.pretrain.0"
    registered = study.client.get_registered_model(name)
    assert registered.aliases == {"current": 2}
    images = numpy.ones((3, 1, 8, 8), "float32")
    for address, expected in zip((f"{name}/1", f"{name}@current"), scores, strict=True):
        loaded = load_model(model_folder(f"models:/{address}"))
        with torch.inference_mode():
            said = loaded(torch.from_numpy(images)).prediction
        torch.testing.assert_close(said, expected)
    by_mlflow = mlflow.pyfunc.load_model(f"models:/{name}@current").predict({"images": images})
    numpy.testing.assert_allclose(by_mlflow, scores[1].numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="^models:/none/1: no such model in sqlite.*; allowed: "):
        model_folder("models:/none/1")
    with pytest.raises(UserError, match="load_model\\(model_folder\\("):
        load_model(f"models:/{name}@current")


def test_a_model_that_cannot_be_read_is_left_out_in_words(study):
    with record("pretrain", None, method="dense", seed=0) as run:
        run.model("artifacts/pretrain/dense/0")
    assert Importer().update().added == 1
    [stored] = study.runs()
    assert stored.info.status == "FINISHED"
    assert stored.data.tags["moecore.model"].startswith("left out: ")
    assert (
        "artifacts/pretrain/dense/0/model.json: no such file" in stored.data.tags["moecore.model"]
    )
