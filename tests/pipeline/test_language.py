"""Studies of language models, on files like WikiText and mosaics; of images and captions."""

import csv
import json
import os

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from moecore import Prepared, predict_in_batches
from moecore.data.files.decode import decode_image
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.tokenizers import load_tokenizer
from moecore.measure.base import read_result
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import ImageSpec, count_total_and_active_parameters
from moecore.pipeline import predict_cli
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.report.pictures.robustness import scores_by_epsilon
from moecore.stages import finetune, prepare, pretrain
from moecore.study.study import Study
from moecore.tasks import Classification, MultiLabel, NextToken
from moecore.training.artifacts import load_model, record_no_guide_needed
from moecore.training.outcome import Outcome
from tests import forked
from tests.data.sources.test_mosaic import split_file
from tests.data.text.test_text import bpe_file
from tests.project import check_params, compose_shipped, write_question
from tests.training.test_teachers import weights

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
    scale = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    image = ImageSpec(channels=channels, size=source.size, task=NextToken(words=WORDS), **scale)
    for name in study.run.methods:
        method = study.methods[name]
        with torch.device("meta"):
            made = method.merge_model_settings(model).build(image, method.moe)
        found = count_total_and_active_parameters(made)["parameters"]
        assert found / 1e6 == pytest.approx(millions, abs=0.05)
        # embedding, head with bias, one position table, and blocks of attention, three norms, a
        # gate with bias and sixteen experts of two layers
        one = 4 * width**2 + 3 * 2 * width + 16 * (width + 1) + (16 * 2 * (width * width + width))
        assert found == 2 * WORDS * width + WORDS + width // 8 * span + depth * one


def test_weights_of_the_regularizer_are_those_of_a_gpu_without_h_squared():
    for study, tokens in (("moge/language", 32 * 64), (STUDY, 96 * 256)):
        data = compose_shipped(study).document.data
        weight = data["methods"]["smoge"]["regularizers"][0]["weight"]
        assert weight * tokens / 9 == pytest.approx(1e-6 * 3072)


def write_words(folder):
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
        (folder / f"wiki.{name}.tokens").write_text("\n".join(text) + "\n", encoding="utf-8")


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
    stages = ["code", "prepare pretrain", "teacher_router momentum_moge 0"]
    stages += ["pretrain momentum_moge 0", "measure routing pretrain momentum_moge 0", "compare"]
    for words in stages:
        done = forked.run(folder, words.split(), {**os.environ, "MOECORE_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    path = folder / "artifacts/measured/pretrain/momentum_moge/0.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    card = json.loads((folder / "artifacts/data/pretrain/card.json").read_text(encoding="utf-8"))
    assert card["task"]["words"] == 304  # with =, Heading, <eos> and <unk>
    assert card["tokens"]["train"] == 3 + 3 + 400 * 42
    assert [row["step"] for row in result["curve"]] == [5, 10, 15, 20] and result["ppl"] < 300
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
        write_all_hashes("params.yaml")
        for name in ("pretrain", "finetune", "adversarial"):
            prepare.prepare(name)
        (home / "artifacts/teacher_router/vmoe/0").mkdir(parents=True)
        record_no_guide_needed(home / "artifacts/teacher_router/vmoe/0")
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
    assert found.task == MultiLabel(classes=tuple("0123456789")) and found.test_correct == sum(hits)
    assert found.test_count == 150 and found.test_score.value == pytest.approx(sum(hits) / 150)
    assert found.test_score.low < found.test_score.value < found.test_score.high
    assert found.false_discovery_rate == pytest.approx(1 - sum(hits) / 150)
    assert found.confusion is None
    assert found.validation_score.value == pytest.approx(found.curve[-1]["validation_accuracy"])
    # four cells show 3.4 of ten classes on average, so a guess is right in 34 %; it has learned
    # more than that
    assert found.test_score.value > 0.45 and found.test_loss < 10 * np.log(2)


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
        assert found.false_discovery_rate is None and len(found.confusion) == 10
        assert found.test_count == 150
    models = (labelled / f"artifacts/{phase}/vmoe/0" for phase in ("finetune", "adversarial"))
    first, second = ((model / "model.safetensors").read_bytes() for model in models)
    assert first != second
    assert (labelled / "artifacts/history/adversarial/vmoe/0/history.jsonl").exists()
    losses = [found.curve[0]["train_loss"] for found in (clean, attacked)]
    assert losses[0] < losses[1], "attacked images are harder"


CAPTIONS = "ermoe/image_text"
ENVIRONMENT = {**os.environ, "MOECORE_THREADS": "1"}
DIGITS = {"kind": "digits", "size": 14}
SMALL = {"kind": "captioned_mosaic", "source": DIGITS, "train": 120, "validation": 40, "test": 50}
STAGES = (
    *("code", "prepare pretrain", "prepare finetune", "teacher_router {0} 0", "pretrain {0} 0"),
    *("finetune finetune {0} 0", "robustness finetune {0} 0", "measure routing finetune {0} 0"),
    *("measure retrieval finetune {0} 0", "measure explorer finetune {0} 0"),
)


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    place = tmp_path_factory.mktemp("study") / ".runs/ermoe.image_text"
    path = write_question(place, CAPTIONS)
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["data"] = {"pretrain": SMALL, "finetune": SMALL | {"seed": 1}}
    data["model"]["image"] |= {"patch": 7, "width": 24}
    data["run"] |= {"methods": ["vmoe_text", "ermoe_frozen"], "seeds": [0], "phases": ["finetune"]}
    data["run"] |= {"measurements": ["retrieval", "explorer"], "thorough": ["finetune"]}
    data["claims"], data["questions"] = [], []
    for phase in ("pretrain", "finetune"):
        data[phase] |= {"epochs": 2, "batch": 20, "warmup_epochs": 0}
    data["robustness"] |= {"images": 12, "epsilons": [0.05]}
    data["routing"] |= {"images": 12}
    data["explorer"] = {"images": 4, "epsilons": [0.05], "augmentations": []}
    data["explorer"]["attack"] = {"kind": "pgd", "steps": 2}
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    methods = ("vmoe_text", "ermoe_frozen")
    run(place, [*(stage.format(method) for method in methods for stage in STAGES), "compare"])
    return place


def run(place, lines) -> None:
    for line in dict.fromkeys(lines):
        done = forked.run(place, line.split(), ENVIRONMENT)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def result(captioned, what: str, method: str) -> dict:
    path = captioned / "artifacts/measured" / what / method / "0.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_both_directions_and_the_experts_of_words(captioned):
    stored = result(captioned, "retrieval/finetune", "vmoe_text")
    found = Found.model_validate({key: stored[key] for key in stored if key in Found.model_fields})
    assert (found.facts["images"], found.facts["captions"]) == (50, 250)
    for way in ("text_to_image", "image_to_text"):
        recall = found.curve(way, "k")
        values = list(recall.values())
        assert list(recall) == [1, 5, 10] and values == sorted(values)
        first = found.find(way, k=1)
        assert first.low <= first.value <= first.high
    (layer,) = found.facts["layers"]
    same, chance = (found.find(f"word_same_expert{end}").value for end in ("", "_chance"))
    assert same >= chance
    words = {word["word"]: word for word in layer}
    assert words["<start>"]["count"] == words["<end>"]["count"] == 250
    assert sum(words["top"]["experts"]) == pytest.approx(1, abs=1e-3) and "<pad>" not in words
    trained = result(captioned, "finetune", "vmoe_text")
    assert trained["test_score"]["value"] == pytest.approx(found.find("text_to_image", k=1).value)
    assert result(captioned, "retrieval/finetune", "ermoe_frozen")["facts"]["layers"] == []


def test_attacks_make_retrieval_no_better(captioned):
    path = captioned / "artifacts/measured/robustness/finetune/vmoe_text/0.json"
    found = read_result(path, Found, "robustness")
    for left in (scores_by_epsilon(found, "pgd-10"), found.all("worst")):
        assert left[-1].value <= left[0].value
    losses = [value.value for value in found.all("loss") if value.at["attack"] == "pgd-10"]
    assert losses[-1] > losses[0]


def test_the_table_and_the_page_say_it(captioned):
    path = captioned / "artifacts/compare.json"
    row = json.loads(path.read_text(encoding="utf-8"))["vmoe_text"]["finetune"]
    wanted = {"text_to_image_r1", "image_to_text_r10", "word_same_expert", "accuracy_worst_case"}
    assert wanted <= set(row)
    assert row["text_to_image_r1"]["mean"] == pytest.approx(row["test_accuracy"]["mean"])
    page = (captioned / "reports/index.html").read_text(encoding="utf-8")
    assert "text → image R@1" in page and "Images and captions" in page and "&lt;start&gt;" in page
    assert "Experts of patches and words" in page
    read = result(captioned, "retrieval/finetune", "vmoe_text")["facts"]
    assert read["overlays"]["shape"] == [4, 1, 28, 28] and len(read["overlays"]["grids"]) == 2
    tokens = np.load(captioned / "artifacts/data/finetune/test_labels.npy")
    words = (captioned / "artifacts/data/finetune/vocabulary.txt").read_text("utf-8").splitlines()
    for image, (layer,) in zip(evenly_spaced_indices(50, 4), read["captions_read"], strict=True):
        spoken = [words[token] for token in tokens[image, 0] if token]
        assert [word for word, _ in layer] == spoken and all(0 <= expert < 8 for _, expert in layer)
    dense = result(captioned, "retrieval/finetune", "ermoe_frozen")["facts"]["captions_read"]
    assert all(expert == -1 for (layer,) in dense for _, expert in layer)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The study with its preset, as `moecore study preset` leaves it; no file is there yet."""
    place = tmp_path_factory.mktemp("preset") / ".runs/ermoe.image_text"
    write_question(place, CAPTIONS, ("clip_b16",))
    return place


def test_the_preset_runs_on_small_files_of_the_same_forms(clip):
    raw = clip / "data/raw"
    (raw / "clip").mkdir(parents=True)
    split_file(raw / "coco", "dataset_coco.json", "val2014")
    (raw / "flickr30k").mkdir()
    split_file(raw / "flickr30k/images", "dataset_flickr30k.json", "")
    place = raw / "flickr30k"
    (place / "images/dataset_flickr30k.json").rename(place / "dataset_flickr30k.json")
    bpe_file(raw / "clip/tokenizer.json")
    small = weights()
    small["token_embedding.weight"] = small["token_embedding.weight"][:7]
    save_file(small, raw / "clip/open_clip_model.safetensors")
    path = clip / "params.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for part in data["data"].values():
        part |= {"size": 16, "context": 9}
        part["tokenizer"] |= {"words": 7}
    data["model"]["image"] |= {"patch": 8, "width": 128, "depth": 3, "heads": 2}
    data["model"]["text"] |= {"width": 64, "depth": 2, "heads": 1}
    data["model"]["joint"] = 24
    for phase in ("pretrain", "finetune"):
        data[phase] |= {"epochs": 1, "batch": 4, "warmup_epochs": 0}
    data["robustness"] |= {"images": 4, "epsilons": [0.05], "attacks": [{"kind": "fgsm"}]}
    data["routing"] |= {"images": 4}
    data["run"] |= {"methods": ["vmoe"], "phases": ["finetune"]}
    data["run"] |= {"thorough": ["finetune"]}
    data["methods"]["vmoe"]["blocks"] = data["methods"]["ermoe"]["blocks"] = [1]
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    run(clip, [stage.format("vmoe") for stage in [*STAGES[:3], "teacher 0", *STAGES[3:9]]])
    found = result(clip, "retrieval/finetune", "vmoe")
    assert (found["facts"]["images"], found["facts"]["captions"]) == (4, 20)
    trained = load_file(clip / "artifacts/finetune/vmoe/0/model.safetensors")
    was, now = small["text_projection"].T, trained["text.projection.weight"]
    assert not torch.equal(was, now)
    torch.testing.assert_close(now, was, atol=1e-3, rtol=0)  # steps of 1e-5, from CLIP's


def test_pictures_and_texts_of_a_user_are_compared(captioned, tmp_path, monkeypatch, capsys):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(7):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 30), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    (pictures / "torn.png").write_bytes(b"no picture")
    texts = tmp_path / "texts.txt"
    said = ["top left: 1, top right: 2", "a zebra", " ".join(["1"] * 60)]
    texts.write_text("\n\n".join([*said, said[0]]) + "\n", encoding="utf-8")
    model = captioned / "artifacts/finetune/vmoe_text/0"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_THREADS", "1")

    def predict(*words: str) -> tuple[object, str]:
        """The exit code, or the words of a refusal; and what was printed."""
        with pytest.raises(SystemExit) as end:
            predict_cli.main([str(model), str(pictures), *words])
        return end.value.code, "".join(capsys.readouterr())

    code, told = predict("--texts", str(texts), "--batch", "3")
    assert code == 3, told
    assert "torn.png: " in told and "not a picture, or damaged" in told
    assert "1 of 3 texts are longer than the context and were cut" in told
    with open(tmp_path / "predictions.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [*(f"{n}.png" for n in range(7)), "torn.png"]
    assert rows[-1]["error"] and not rows[-1]["prediction"]
    towers = load_model(model)
    tokenizer = load_tokenizer(model, towers.text.task)
    context = towers.text.task.context
    ends = []
    for text in said:
        tokens = torch.tensor([tokenizer.encode(text, context).tokens])
        ends.append(towers.text(tokens)[0][0].detach().double())
    expected = np.empty((7, 3))
    for number in range(7):
        pixels = decode_image(pictures / f"{number}.png", 28, 1)
        side = towers(torch.tensor(pixels[None]) / 255).prediction[0, :-1].detach().double()
        expected[number] = [float(side @ one / side.norm() / one.norm()) for one in ends]
    scale = float(towers.logit_scale.detach().exp())
    for row, near in zip(rows, expected, strict=False):
        assert [float(row[text]) for text in said] == pytest.approx(near, abs=1e-5)
        assert row["prediction"] == said[int(near.argmax())]
        shares = np.exp(scale * near) / np.exp(scale * near).sum()
        assert float(row["probability"]) == pytest.approx(shares.max(), abs=1e-3)
    with open(tmp_path / "predictions_texts.csv", encoding="utf-8", newline="") as file:
        best = list(csv.DictReader(file))
    assert len(best) == 3 * 5
    for place, text in enumerate(said):
        mine = [row for row in best if row["text"] == text]
        order = np.sort(expected[:, place])[::-1][:5]
        assert [float(row["cosine"]) for row in mine] == pytest.approx(order, abs=1e-5)
    page = (tmp_path / "predictions.html").read_text(encoding="utf-8")
    assert "1 words that the vocabulary does not have" in page and "cut" in page
    assert page.count("<sub>") >= 3 * 5 and "data:image/png" in page
    assert "it takes --texts FILE" in predict()[0]
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n", encoding="utf-8")
    assert "found 0 texts; allowed: 1 to 10,000" in predict("--texts", str(empty))[0]
    refused, _ = predict("--texts", str(texts), "--calibrator", str(tmp_path))
    assert "cosines are not calibrated" in refused
