import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
import torch

from moecore.backbones import TwoTowers, Vit
from moecore.core.files import UserError
from moecore.core.source_layout import allow_packages
from moecore.nn.experts.mlp import Mlp
from moecore.parts import Classification, ImageSpec, MoESettings
from moecore.report.report_files import name_numbers_for_mlflow
from moecore.run.run_record import record_run
from moecore.statistics.intervals import Interval
from moecore.tasks.image_text import ImageText, similarity_logits
from moecore.tasks.next_token import NextToken
from moecore.tracking import sync as module
from moecore.tracking import ui
from moecore.tracking.mlflow_run import model_folder, model_signature
from moecore.tracking.sync import HEADLINE_NAMES_TAG, AllStudiesImporter
from moecore.training.artifacts import load_model, save_model
from tests.browser import opened
from tests.my_lab import forget_package, write_my_lab
from tests.tracking.conftest import calibrate, only_run

FOLDER = "artifacts/pretrain/dense/0"
VIT = Vit(patch=4, width=16, depth=2, heads=2)
SCRIPT = """
import sys, mlflow.pyfunc, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.metadata.signature)
with numpy.load(sys.argv[2], allow_pickle=False) as given:
    numpy.save(sys.argv[3], model.predict(dict(given)))
"""


def image_spec(task, **changed) -> ImageSpec:
    spec = {"channels": 1, "size": 8, "mean": (0.5,), "std": (0.5,)} | changed
    return ImageSpec(task=task, **spec)


def train(model) -> None:
    with record_run("pretrain", None, method="dense", seed=0) as run:
        save_model(FOLDER, model)
        run.log_model_folder(FOLDER)


def classifier() -> torch.nn.Module:
    model = VIT.build(image_spec(Classification(classes=("x", "y")))).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


def predict_by_mlflow(study, **given) -> tuple[str, numpy.ndarray]:
    [logged] = study.client.search_logged_models([only_run(study).info.experiment_id])
    folder = Path(logged.artifact_location.removeprefix("file://"))
    unsafe = (".pkl", ".pickle", ".pt", ".pth")
    assert not [file for file in folder.rglob("*") if file.suffix in unsafe]
    numpy.savez("given.npz", **given)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", SCRIPT, str(folder), "given.npz", "scores.npy"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, numpy.load("scores.npy", allow_pickle=False)


def test_a_model_of_text_takes_words():
    spec = {"channels": 3, "size": (4,), "mean": (0.0,) * 3, "std": (1.0,) * 3}
    signature = model_signature(image_spec(NextToken(words=11), **spec))
    assert "words" in str(signature.inputs) and "(-1, 3, 4)" in str(signature.inputs)
    assert "(-1, 4, 11)" in str(signature.outputs)


def test_two_towers_are_logged_linked_and_take_captions_too(study):
    task = ImageText(words=9, context=4, captions=2, end=2, vocabulary="0" * 64)
    text = {"width": 8, "depth": 1, "heads": 2}
    model = TwoTowers(image=VIT, text=text, joint=6).build(image_spec(task)).eval()
    train(model)
    AllStudiesImporter().import_all()
    captions = numpy.array([[1, 5, 2, 0], [1, 6, 7, 2]])
    images = numpy.ones((3, 1, 8, 8), "float32")
    signature, scores = predict_by_mlflow(study, images=images, captions=captions)
    assert "'captions': Tensor('int64', (-1, 4))" in signature and "(-1, 1, 8, 8)" in signature
    for run in (only_run(study), study.parent("dense/0")):  # what the column Models shows
        assert len(run.outputs.model_outputs) == 1
    with torch.inference_mode():
        sides = model(torch.from_numpy(images)).prediction
        expected = similarity_logits(sides, model.targets(torch.from_numpy(captions))[:, 0])
    numpy.testing.assert_allclose(scores, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_a_registered_model_loads_by_its_name(study):
    import mlflow

    images = numpy.ones((3, 1, 8, 8), "float32")
    scores = []
    for _ in range(2):
        model = classifier()
        train(model)
        AllStudiesImporter().import_all()
        scores.append(model(torch.from_numpy(images)).prediction.detach())
    name = f"{study.folder.name}.dense.pretrain.0"
    assert study.client.get_registered_model(name).aliases == {"current": 2}
    for address, expected in zip((f"{name}/1", f"{name}@current"), scores, strict=True):
        loaded = load_model(model_folder(f"models:/{address}"))
        with torch.inference_mode():
            torch.testing.assert_close(loaded(torch.from_numpy(images)).prediction, expected)
    by_mlflow = mlflow.pyfunc.load_model(f"models:/{name}@current").predict({"images": images})
    numpy.testing.assert_allclose(by_mlflow, scores[1].numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="^models:/none/1: .*allowed: "):
        model_folder("models:/none/1")
    with pytest.raises(UserError, match="load_model\\(moecore.model_folder\\("):
        load_model(f"models:/{name}@current")


def test_a_model_with_parts_from_outside_carries_their_package(study, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_my_lab(study.folder / "src")
    (study.folder / "params.yaml").write_text("packages: [my_lab]\n", encoding="utf-8")
    allow_packages(["my_lab"], [study.folder])
    router = {"kind": "my_lab.cosine", "k": 1}
    moe = MoESettings.model_validate({"router": router, "experts": Mlp(number=4), "blocks": "all"})
    model = VIT.build(image_spec(Classification(classes=("x", "y"))), moe).eval()
    torch.nn.init.normal_(model.head.weight)
    train(model)
    allow_packages((), ())
    AllStudiesImporter().import_all()
    allow_packages((), ())
    shutil.rmtree(study.folder / "src")
    images = numpy.ones((3, 1, 8, 8), "float32")
    _, scores = predict_by_mlflow(study, images=images)
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).prediction
    numpy.testing.assert_allclose(scores, expected.numpy(), rtol=1e-5, atol=1e-6)
    tags = only_run(study).data.tags
    assert tags["version.my_lab"] == "source tree" and tags["version.torch"] == torch.__version__
    forget_package()


def test_a_model_is_logged_once_also_where_an_import_was_killed(study, monkeypatch):
    train(classifier())

    def log_half(client, run_id, name, experiment_id, _):
        client.create_logged_model(experiment_id, name, source_run_id=run_id)
        raise SystemExit

    kill = Mock(side_effect=SystemExit)
    for name, action in (("log_model", log_half), ("register_model", kill)):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(module.mlflow_run, name, action)
            AllStudiesImporter().import_all()
    AllStudiesImporter().import_all()
    [logged] = study.client.search_logged_models([only_run(study).info.experiment_id])
    assert logged.status == "READY"
    name = f"{study.folder.name}.dense.pretrain.0"
    [made] = study.client.search_model_versions(f"name = '{name}'")
    assert only_run(study).data.tags["moecore.registered"] == f"{name} {made.version}"


def test_a_model_that_cannot_be_read_is_left_out_in_words(study):
    with record_run("pretrain", None, method="dense", seed=0) as run:
        run.log_model_folder(FOLDER)
    AllStudiesImporter().import_all()
    said = only_run(study).data.tags["moecore.model"]
    assert said.startswith("left out: ") and f"{FOLDER}/model.json" in said


# MLflow asks whether users have to log in, and its charts are resized while they are drawn.
KNOWN = ("404 (Not Found)", "ResizeObserver loop")
SLUGS = ("acc", "worst", "ece", "move", "top1", "cv2", "ms")
WAIT = 120_000  # milliseconds
RIGHT = "getBoundingClientRect().right"
VISIBLE = f"""[...document.querySelectorAll('[data-testid^=sort-header][data-testid*="/"]')].filter(
  name => name.{RIGHT} <= name.closest('[col-id]').{RIGHT}).map(name => name.textContent)"""
SCROLL = "document.querySelector('.ag-body-horizontal-scroll-viewport').scrollBy(300, 0)"
OFTEN = """
from moecore.pipeline.cli import app
from moecore.tracking import ui
ui.SECONDS_BETWEEN_IMPORTS = 0.2
app()
"""


def wait_until(condition, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ui.HOST, port)) == 0


def unused_port() -> int:
    with socket.socket() as free:
        free.bind((ui.HOST, 0))
        return free.getsockname()[1]


def test_the_first_view_has_metrics_data_source_and_live_runs(study, request):
    Path("params.yaml").write_text("run: {methods: [dense, vmoe]}\n")
    study.write()
    calibrate()
    port = unused_port()
    process = study.start("-c", OFTEN, "ui", "--port", str(port))
    try:
        assert "importing new results of 2 runs into sqlite:" in process.stdout.readline()
        assert "2 runs added" in process.stdout.readline()
        assert process.stdout.readline().endswith("compareRunsMode=CHART\n")
        address = process.stdout.readline().strip()
        assert address.startswith(f"http://{ui.HOST}:{port}/#/experiments/")
        with record_run("pretrain", None, method="dense", seed=0) as run:
            run.log(1, {"loss": 1.0})
            wait_until(lambda: sum("dvc.current" in run.data.tags for run in study.parents()) == 2)
            assert study.parent("dense/0").info.status == "RUNNING"
        wait_until(lambda: study.parent("dense/0").info.status == "FINISHED")
        wait_until(lambda: answers(port))
        browser = request.getfixturevalue("browser")
        numbers = {}
        for phase, slug in product(("finetune", "pretrain"), SLUGS):
            numbers |= name_numbers_for_mlflow(slug, phase, Interval(0.123456, 0.1, 0.2))
        parent = study.parent().info.run_id
        for name, value in numbers.items():
            study.client.log_metric(parent, name, value)
        study.client.set_tag(parent, HEADLINE_NAMES_TAG, " ".join(numbers))
        wait_until(lambda: "metrics.`ms/pretrain`" in study.view()["selectedColumns"])
        from playwright.sync_api import expect

        with opened(browser, address, 1400, "light", KNOWN) as page:
            body = page.locator("body")
            for words in ("vmoe seed 0", "dense seed 0", "acc/finetune", "0.1235"):
                expect(body).to_contain_text(words, timeout=WAIT)
            names = set()
            for _ in range(9):
                names |= set(page.evaluate(VISIBLE))
                page.evaluate(SCROLL)
                page.wait_for_timeout(300)
            assert names == {name for name in [*numbers][6:] if "." not in name} | {*[*numbers][:6]}
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error and not answers(port)


def test_a_port_that_is_taken_is_one_clear_line(study):
    with socket.socket() as taken:
        taken.bind((ui.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port}: .*--port"):
            ui.serve_ui(port)


@pytest.fixture
def kept_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_ends_it_after_the_import_and_a_second_one_at_once(
    study, monkeypatch, kept_handlers, presses
):
    done = []

    class Importing(AllStudiesImporter):
        def import_all(self):
            assert len(done) < 2
            for _ in range(presses * len(done)):
                signal.raise_signal(signal.SIGINT)
            counts = super().import_all()
            done.append(counts)
            return counts

    start = lambda port: subprocess.Popen(["sleep", "60"], start_new_session=True)
    monkeypatch.setattr(ui, "SECONDS_BETWEEN_IMPORTS", 0)
    monkeypatch.setattr(ui, "AllStudiesImporter", Importing)
    monkeypatch.setattr(ui, "start_server", start)
    assert ui.serve_ui(unused_port()) == 0 and len(done) == 3 - presses
