"""Studies of language models: as table 10 prints them, on files like WikiText, and on mosaics."""

import json
import os

import numpy as np
import pytest
import torch
import yaml

from moecore.data.prepared import Prepared
from moecore.measure.base import read_result
from moecore.nn.backbones.base_model import ImageSpec, parameter_counts
from moecore.nn.predict import predict_in_batches
from moecore.pipeline.code_hashes import write_code
from moecore.stages import finetune, prepare, pretrain
from moecore.study.study import Study
from moecore.tasks.classification import Classification
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.next_token import NextToken
from moecore.training.artifacts import load_model, save_no_guide
from moecore.training.outcome import Outcome
from tests import forked
from tests.project import check_params, compose_shipped, write_question

STUDY = "moge/wikitext103"
WORDS = 267_735


@pytest.fixture
def folder(tmp_path):
    return tmp_path / ".runs/moge.wikitext103"


def settings_of(place, names=()) -> Study:
    return check_params(write_question(place, STUDY, names))


# table 10; millions of parameters by arithmetic, from the shapes of MomentumSMoE's code
@pytest.mark.parametrize(
    ("names", "depth", "width", "span", "millions"),
    [((), 3, 128, 256, 70.6), (("medium",), 6, 352, 1024, 215.7)],
)
def test_sizes_are_those_of_table_10(folder, names, depth, width, span, millions):
    study = settings_of(folder, names)
    model, source = study.model, study.data["pretrain"]
    channels = source.context + 1
    image = ImageSpec(
        channels=channels,
        size=source.size,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        task=NextToken(words=WORDS),
    )
    for name in study.run.methods:
        method = study.methods[name]
        with torch.device("meta"):
            made = method.merge_model_settings(model).build(image, method.moe)
        found = parameter_counts(made)["parameters"]
        assert found / 1e6 == pytest.approx(millions, abs=0.05)
        # embedding, head with bias, one position table, and blocks of attention, three norms, a
        # gate with bias and sixteen experts of two layers
        experts = 16 * 2 * (width * width + width)
        one = 4 * width**2 + 3 * 2 * width + 16 * (width + 1) + experts
        assert found == 2 * WORDS * width + WORDS + width // 8 * span + depth * one


def test_weights_of_the_regularizer_are_those_of_a_gpu_without_h_squared():
    for study, tokens in (("moge/language", 32 * 64), (STUDY, 96 * 256)):
        data = compose_shipped(study).document.data
        weight = data["methods"]["smoge"]["regularizers"][0]["weight"]
        assert weight * tokens / 9 == pytest.approx(1e-6 * 3072)


def write_words(folder):
    """Files in WikiText's form: headings, empty lines, words apart by blanks."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    words = [f"w{number}" for number in range(300)]
    for name, lines in (("train", 400), ("valid", 30), ("test", 30)):
        text = [" ", " = Heading = ", " "]
        for _ in range(lines):
            # every word is followed by one of three
            place = int(draws.integers(300))
            line = []
            for _ in range(40):
                line.append(words[place])
                place = (3 * place + int(draws.integers(3))) % 300
            text += [f" {' '.join(line)} ", " "]
        path = folder / f"wiki.{name}.tokens"
        path.write_text("\n".join(text) + "\n", encoding="utf-8")


def test_twenty_updates(folder, tmp_path):
    write_words(tmp_path / "words")
    settings_of(folder)
    path = folder / "params.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["data"]["pretrain"] |= {"root": str(tmp_path / "words"), "name": "wikitext"}
    data["run"] |= {"methods": ["momentum_moge"], "seeds": [0]}
    data["claims"] = []
    data["routing"] |= {"images": 8, "sweeps": {"k": [1, 2]}}
    data["pretrain"] |= {"epochs": 2, "updates": 10, "batch": 4, "warmup_epochs": 0, "log_every": 5}
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    for words in (
        "code",
        "prepare pretrain",
        "teacher_router momentum_moge 0",
        "pretrain momentum_moge 0",
        "measure routing pretrain momentum_moge 0",
        "compare",
    ):
        done = forked.run(folder, words.split(), {**os.environ, "MOECORE_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    result = json.loads(
        (folder / "artifacts/measured/pretrain/momentum_moge/0.json").read_text(encoding="utf-8")
    )
    card = json.loads((folder / "artifacts/data/pretrain/card.json").read_text(encoding="utf-8"))
    assert card["task"]["words"] == 304  # with =, Heading, <eos> and <unk>
    assert card["tokens"]["train"] == 3 + 3 + 400 * 42
    assert [row["step"] for row in result["curve"]] == [5, 10, 15, 20]
    assert result["ppl"] < 300
    metrics = folder / "reports/metrics/pretrain/momentum_moge-0.json"
    found = json.loads(metrics.read_text(encoding="utf-8"))
    assert found["ppl"] == pytest.approx(result["ppl"], rel=1e-4) and "load_cv2" in found
    page = (folder / "reports/index.html").read_text(encoding="utf-8")
    assert "Validation perplexity" in page and " of momentum_moge is " in page


TRAINING = "batch: 50, learning_rate: 0.005, log_every: 5, warmup_epochs: 0.5, precision: float32"
PARAMS = f"""\
run: {{methods: [dense, vmoe], seeds: [0], phases: [finetune, adversarial]}}
data:
  pretrain:
    {{kind: mosaic, source: {{kind: digits, size: 8}}, train: 500, validation: 100, test: 150}}
  finetune: &clean {{kind: digits, size: 16, train_limit: 300, test_limit: 150}}
  adversarial: *clean
model: {{kind: vit, patch: 4, width: 16, depth: 2, heads: 2, mlp_ratio: 2}}
methods:
  dense: {{}}
  vmoe:
    router: {{kind: noisy_top_k, k: 2}}
    experts: {{kind: mlp, number: 4, hidden_ratio: 1}}
    blocks: [1]
    regularizers: [{{kind: importance, weight: 0.005}}]
pretrain: {{epochs: 4, {TRAINING}}}
finetune: &training {{epochs: 3, {TRAINING}}}
adversarial: {{epochs: 3, {TRAINING}, adversarial: {{steps: 2, epsilon: 0.05}}}}
calibrate: {{calibrator: {{kind: temperature}}}}
"""


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Every stage ran for the method with experts, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("several")
        patch.chdir(home)
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (home / "params.yaml").write_text(PARAMS)
        write_code("params.yaml")
        for name in ("pretrain", "finetune", "adversarial"):
            prepare.prepare(name)
        (home / "artifacts/teacher_router/vmoe/0").mkdir(parents=True)
        save_no_guide(home / "artifacts/teacher_router/vmoe/0")
        pretrain.pretrain("vmoe", 0)
        finetune.finetune("finetune", "vmoe", 0)
        finetune.finetune("adversarial", "vmoe", 0)
        yield home


def measured(labelled, phase: str) -> Outcome:
    return read_result(labelled / f"artifacts/measured/{phase}/vmoe/0.json", Outcome, phase)


def test_pretraining_reports_precision_at_1(labelled):
    found = measured(labelled, "pretrain")
    data = Prepared.open(labelled / "artifacts/data/pretrain")
    model = load_model(labelled / "artifacts/pretrain/vmoe/0")
    best = predict_in_batches(model, data.test.images, 70)[0].argmax(1).numpy()
    hits = [int(data.test.labels[image, best[image]]) for image in range(150)]
    assert found.task == MultiLabel(classes=tuple("0123456789"))
    assert found.test_correct == sum(hits)
    assert found.test_count == 150
    assert found.test_score.value == pytest.approx(sum(hits) / 150)
    assert found.test_score.low < found.test_score.value < found.test_score.high
    assert found.false_discovery_rate == pytest.approx(1 - sum(hits) / 150)
    assert found.confusion is None
    last = found.curve[-1]["validation_accuracy"]
    assert found.validation_score.value == pytest.approx(last)
    # four cells show 3.4 of ten classes on average, so a guess is right in 34 %; it has learned
    # more than that
    assert found.test_score.value > 0.45
    assert found.test_loss < 10 * np.log(2)


def test_class_maps_count_an_image_for_each_of_its_labels(labelled):
    maps = np.array(measured(labelled, "pretrain").class_maps["4"])
    data = Prepared.open(labelled / "artifacts/data/pretrain")
    model = load_model(labelled / "artifacts/pretrain/vmoe/0")
    probs = predict_in_batches(model, data.validation.images, 100)[1][0].probs.mean(1).numpy()
    expected = [probs[data.validation.labels[:, digit] == 1].mean(0) for digit in range(10)]
    np.testing.assert_allclose(maps[:, 0], expected, atol=1e-4)


def test_clean_and_adversarial_models_stand_side_by_side(labelled):
    clean = measured(labelled, "finetune")
    attacked = measured(labelled, "adversarial")
    for found in (clean, attacked):
        assert found.task == Classification(classes=tuple("0123456789"))
        assert found.false_discovery_rate is None
        assert len(found.confusion) == 10
        assert found.test_count == 150
    models = (labelled / f"artifacts/{phase}/vmoe/0" for phase in ("finetune", "adversarial"))
    first, second = ((model / "model.safetensors").read_bytes() for model in models)
    assert first != second
    assert (labelled / "artifacts/history/adversarial/vmoe/0/history.jsonl").exists()
    losses = [found.curve[0]["train_loss"] for found in (clean, attacked)]
    assert losses[0] < losses[1], "attacked images are harder"
