"""A trained model in MLflow: a signature, no pickle, and it loads without this repository."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlflow
import numpy
import pytest
import torch
from playwright.sync_api import expect

from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.two_towers import TwoTowers
from moecore.nn.backbones.vit import Vit
from moecore.run.history import record
from moecore.tasks.classification import Classification
from moecore.tasks.image_text import ImageText
from moecore.tasks.next_token import NextToken
from moecore.tracking import mirror
from moecore.tracking.model import model_folder
from moecore.tracking.names import charts
from moecore.tracking.sync import Importer
from moecore.training.artifacts import load_model, save_model
from tests.browser import opened
from tests.tracking.test_parents import calibrate, parent

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


OF_TEXT = """
import sys, mlflow.pyfunc, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.metadata.signature)
numpy.save(sys.argv[2], model.predict({"words": numpy.arange(12).reshape(1, 3, 4) % 11}))
"""


def test_a_model_of_text_takes_words(study):
    spec = {"channels": 3, "size": (4,), "mean": (0.0,) * 3, "std": (1.0,) * 3}
    image = ImageSpec(task=NextToken(words=11), **spec)
    model = LanguageModel(width=8, depth=1, heads=2, span=4).build(image).eval()
    with record("pretrain", None, method="smoe", seed=0) as run:
        save_model("artifacts/pretrain/smoe/0", model)
        run.model("artifacts/pretrain/smoe/0")
    Importer().update()
    [stored] = study.runs()
    [logged] = study.client.search_logged_models([stored.info.experiment_id])
    folder = logged.artifact_location.removeprefix("file://")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", OF_TEXT, folder, "scores.npy"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'words': Tensor('int64', (-1, 3, 4))" in done.stdout
    assert "'scores': Tensor('float32', (-1, 4, 11))" in done.stdout
    with torch.inference_mode():
        expected = model(torch.arange(12).view(1, 3, 4) % 11).prediction
    scores = numpy.load("scores.npy", allow_pickle=False)
    numpy.testing.assert_allclose(scores, expected.numpy(), rtol=1e-5, atol=1e-6)


OF_CAPTIONS = """
import sys, mlflow.pyfunc, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.metadata.signature)
given = {"images": numpy.ones((3, 1, 8, 8), "float32")}
given["captions"] = numpy.array([[1, 5, 2, 0], [1, 6, 7, 2]])
numpy.save(sys.argv[2], model.predict(given))
"""


def test_two_towers_take_captions_too(study):
    task = ImageText(words=9, context=4, captions=2, end=2, vocabulary="0" * 64)
    image = ImageSpec(channels=1, size=8, task=task, mean=(0.5,), std=(0.5,))
    text = {"width": 8, "depth": 1, "heads": 2}
    towers = TwoTowers(image=Vit(patch=4, width=16, depth=2, heads=2), text=text, joint=6)
    model = towers.build(image).eval()
    with record("pretrain", None, method="dense", seed=0) as run:
        save_model("artifacts/pretrain/dense/0", model)
        run.model("artifacts/pretrain/dense/0")
    Importer().update()
    [stored] = study.runs()
    [logged] = study.client.search_logged_models([stored.info.experiment_id])
    folder = logged.artifact_location.removeprefix("file://")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", OF_CAPTIONS, folder, "scores.npy"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'captions': Tensor('int64', (-1, 4))" in done.stdout
    with torch.inference_mode():
        side = model(torch.ones(3, 1, 8, 8)).prediction[0, :-1]
        ends = [model.text(torch.tensor([row]))[0][0] for row in ([1, 5, 2, 0], [1, 6, 7, 2])]
    expected = [float(side @ one / one.norm()) for one in ends]
    scores = numpy.load("scores.npy", allow_pickle=False)
    numpy.testing.assert_allclose(scores, [expected] * 3, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("ended", ["within the copy", "before the tags"])
def test_a_model_is_logged_once_also_where_an_import_was_killed(study, monkeypatch, ended):
    task = Classification(classes=("x", "y"))
    image = ImageSpec(channels=1, size=8, task=task, mean=(0.5,), std=(0.5,))
    with record("pretrain", None, method="dense", seed=0) as run:
        save_model(
            "artifacts/pretrain/dense/0", Vit(patch=4, width=16, depth=2, heads=2).build(image)
        )
        run.model("artifacts/pretrain/dense/0")

    def half(run_id, experiment, _):
        study.client.create_logged_model(experiment, "model", source_run_id=run_id)
        raise SystemExit

    if ended == "within the copy":
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(mirror, "log_model", half)
            Importer().update()
    else:
        Importer().update()
        [stored] = study.runs()
        for name in ("moecore.model", "moecore.registered", "moecore.complete"):
            study.client.delete_tag(stored.info.run_id, name)
    assert Importer().update().current == 1
    [stored] = study.runs()
    [logged] = study.client.search_logged_models([stored.info.experiment_id])
    assert logged.status == "READY"
    name = f"{study.folder.name}.dense.pretrain.0"
    [made] = study.client.search_model_versions(f"name = '{name}'")
    assert stored.data.tags["moecore.registered"] == f"{name} {made.version}"


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


# MLflow asks whether users have to log in, and its charts are resized while they are drawn.
KNOWN = ("404 (Not Found)", "ResizeObserver loop")
NOTICES = ("usage data", "telemetry", "Ask questions about your experiments", "Try it now")
WAIT = 60_000  # milliseconds
METHODS = ("dense", "vmoe", "prc")


@pytest.fixture
def served(study):
    """A study of three methods, and the address that `moecore ui` prints."""
    Path("params.yaml").write_text("run: {methods: [dense, vmoe, prc]}\n")
    for method in METHODS:
        study.write(method=method)
    calibrate()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = study.moecore("ui", "--port", str(port))
    try:
        address = process.stdout.readline().strip()
        wait_for(f"http://127.0.0.1:{port}/health")
        while len(study.parents()) < len(METHODS) or parent(study).info.status != "FINISHED":
            time.sleep(0.2)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def wait_for(address: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"{address} does not answer")


def shows(page, *words: str) -> None:
    """Wait for all of these; none of MLflow's notices may be there then."""
    body = page.locator("body")
    for text in words:
        expect(body).to_contain_text(text, timeout=WAIT)
    text = body.inner_text().lower()
    assert not [notice for notice in NOTICES if notice.lower() in text]


def test_first_page_parent_and_comparison(browser, study, served):
    server = served.split("/#")[0]
    [experiment] = {run.info.experiment_id for run in study.every_run()}
    runs = [parent(study, f"{method}/0").info.run_id for method in METHODS]
    pages = f"{server}/#/experiments/{experiment}/runs"
    with opened(browser, served, 1400, "light", KNOWN) as page:
        shows(page, "loss/pretrain total", "test/pretrain ece_after", "3 matching runs")
    with opened(browser, f"{server}/", 1400, "light", KNOWN) as page:
        shows(page, "Recent Experiments")
    with opened(browser, f"{server}/#/models", 1400, "light", KNOWN) as page:
        shows(page, "Registered Models")
    with opened(browser, pages, 1400, "light", KNOWN) as page:
        # parents only: their children are folded
        expect(page.get_by_text("seed 0")).to_have_count(len(METHODS), timeout=WAIT)
        shows(page, *(f"{method} seed 0" for method in METHODS))
    with opened(browser, f"{pages}/{runs[1]}", 1400, "light", KNOWN) as page:
        shows(page, "test/pretrain ece_after", "calibrate pretrain vmoe seed 0")  # a child
    compared = f'compare-runs?runs=["{runs[0]}","{runs[1]}"]&experiments=["{experiment}"]'
    with opened(browser, f"{server}/#/{compared}", 1400, "light", KNOWN) as page:
        shows(page, "Comparing 2 Runs from 1 Experiment", "loss/pretrain total")


def test_the_address_compares_the_current_methods():
    address = charts("http://127.0.0.1:5000", "7")
    assert address.startswith("http://127.0.0.1:5000/#/experiments/7/runs?")
    assert "compareRunsMode=CHART" in address and "tags.level+%3D+%27method%27" in address
    assert charts("http://127.0.0.1:5000", None).endswith(
        "/#/experiments?workflowType=machine_learning"
    )
