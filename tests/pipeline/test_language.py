"""The studies of language models: as table 10 prints them, and twenty updates on files in the form
of WikiText.
"""

import json
import os

import numpy as np
import pytest
import torch
import yaml

from moecore.nn.backbones.base_model import ImageSpec, parameter_counts
from moecore.study.study import Study
from moecore.tasks.next_token import NextToken
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
    assert "Validation perplexity" in page and "momentum_moge has an error of" in page
