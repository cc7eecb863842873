"""The study of images and captions on a few mosaics, and its preset of CLIP's size."""

import csv
import json
import os

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from moecore.data.files.decode import decode_image
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.tokenizers import load_tokenizer
from moecore.measure.base import read_result
from moecore.measure.values import Found
from moecore.pipeline import predict_cli
from moecore.report.pictures.robustness import scores_by_epsilon
from moecore.training.artifacts import load_model
from tests import forked
from tests.data.sources.test_mosaic import split_file
from tests.data.text.test_text import bpe_file
from tests.project import write_question
from tests.training.test_teachers import weights

STUDY = "ermoe/image_text"
ENVIRONMENT = {**os.environ, "MOECORE_THREADS": "1"}
DIGITS = {"kind": "digits", "size": 14}
SMALL = {"kind": "captioned_mosaic", "source": DIGITS, "train": 120, "validation": 40, "test": 50}
STAGES = (
    "code",
    "prepare pretrain",
    "prepare finetune",
    "teacher_router {0} 0",
    "pretrain {0} 0",
    "finetune finetune {0} 0",
    "robustness finetune {0} 0",
    "measure routing finetune {0} 0",
    "measure retrieval finetune {0} 0",
    "measure explorer finetune {0} 0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("study") / ".runs/ermoe.image_text"
    path = write_question(place, STUDY)
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
    """These stages, each once."""
    for line in dict.fromkeys(lines):
        done = forked.run(place, line.split(), ENVIRONMENT)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def result(folder, what: str, method: str) -> dict:
    path = folder / "artifacts/measured" / what / method / "0.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_both_directions_and_the_experts_of_words(folder):
    stored = result(folder, "retrieval/finetune", "vmoe_text")
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
    assert sum(words["top"]["experts"]) == pytest.approx(1, abs=1e-3)
    assert "<pad>" not in words
    trained = result(folder, "finetune", "vmoe_text")
    assert trained["test_score"]["value"] == pytest.approx(found.find("text_to_image", k=1).value)
    assert result(folder, "retrieval/finetune", "ermoe_frozen")["facts"]["layers"] == []


def test_attacks_make_retrieval_no_better(folder):
    path = folder / "artifacts/measured/robustness/finetune/vmoe_text/0.json"
    found = read_result(path, Found, "robustness")
    for left in (scores_by_epsilon(found, "pgd-10"), found.all("worst")):
        assert left[-1].value <= left[0].value
    losses = [value.value for value in found.all("loss") if value.at["attack"] == "pgd-10"]
    assert losses[-1] > losses[0]


def test_the_table_and_the_page_say_it(folder):
    path = folder / "artifacts/compare.json"
    row = json.loads(path.read_text(encoding="utf-8"))["vmoe_text"]["finetune"]
    wanted = {"text_to_image_r1", "image_to_text_r10", "word_same_expert", "accuracy_worst_case"}
    assert wanted <= set(row)
    assert row["text_to_image_r1"]["mean"] == pytest.approx(row["test_accuracy"]["mean"])
    page = (folder / "reports/index.html").read_text(encoding="utf-8")
    assert "text → image R@1" in page and "Images and captions" in page and "&lt;start&gt;" in page
    assert "Experts of patches and words" in page
    read = result(folder, "retrieval/finetune", "vmoe_text")["facts"]
    assert read["overlays"]["shape"] == [4, 1, 28, 28] and len(read["overlays"]["grids"]) == 2
    tokens = np.load(folder / "artifacts/data/finetune/test_labels.npy")
    words = (folder / "artifacts/data/finetune/vocabulary.txt").read_text("utf-8").splitlines()
    for image, (layer,) in zip(evenly_spaced_indices(50, 4), read["captions_read"], strict=True):
        spoken = [words[token] for token in tokens[image, 0] if token]
        assert [word for word, _ in layer] == spoken
        assert all(0 <= expert < 8 for _, expert in layer)
    dense = result(folder, "retrieval/finetune", "ermoe_frozen")["facts"]["captions_read"]
    assert all(expert == -1 for (layer,) in dense for _, expert in layer)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The study with its preset, as `moecore study preset` leaves it; no file is there yet."""
    place = tmp_path_factory.mktemp("preset") / ".runs/ermoe.image_text"
    write_question(place, STUDY, ("clip_b16",))
    return place


def test_the_preset_runs_on_small_files_of_the_same_forms(clip):
    raw = clip / "data/raw"
    (raw / "clip").mkdir(parents=True)
    split_file(raw / "coco", "dataset_coco.json", "val2014")
    (raw / "flickr30k").mkdir()
    split_file(raw / "flickr30k/images", "dataset_flickr30k.json", "")
    (raw / "flickr30k/images/dataset_flickr30k.json").rename(
        raw / "flickr30k/dataset_flickr30k.json"
    )
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
    stages = [*STAGES[:3], "teacher 0", *STAGES[3:9]]
    run(clip, [stage.format("vmoe") for stage in stages])
    found = result(clip, "retrieval/finetune", "vmoe")
    assert (found["facts"]["images"], found["facts"]["captions"]) == (4, 20)
    trained = load_file(clip / "artifacts/finetune/vmoe/0/model.safetensors")
    was, now = small["text_projection"].T, trained["text.projection.weight"]
    assert not torch.equal(was, now)
    torch.testing.assert_close(now, was, atol=1e-3, rtol=0)  # steps of 1e-5, from CLIP's


def test_pictures_and_texts_of_a_user_are_compared(folder, tmp_path, monkeypatch, capsys):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(7):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 30), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    (pictures / "torn.png").write_bytes(b"no picture")
    texts = tmp_path / "texts.txt"
    said = ["top left: 1, top right: 2", "a zebra", " ".join(["1"] * 60)]
    texts.write_text("\n\n".join([*said, said[0]]) + "\n", encoding="utf-8")
    model = folder / "artifacts/finetune/vmoe_text/0"

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
