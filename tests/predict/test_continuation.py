"""A prompt and how it goes on: drawing, the cache, the page, bad prompts."""

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.streams import generator_for
from moecore.data.text.words import read_vocabulary
from moecore.nn.backbones.vit import Vit
from moecore.nn.routers.told import Told
from moecore.pipeline.predict_cli import main
from moecore.predict.continuation import Sampling, continue_file, continue_words, sample_token
from moecore.training.artifacts import save_model, save_words
from tests.browser import opened
from tests.measure.subjects import built, digits
from tests.measure.test_truth import text_subject
from tests.measure.test_words import subject

__all__ = ["subject"]


@pytest.fixture
def trained(subject, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, subject.model)
    save_words(folder, subject.data)
    return folder


def prompt(tmp_path, text="the tensor of unheard words , and the matrix of"):
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_likeliest_words_are_those_of_the_whole_text_read_anew(subject):
    words = ["<eos>", "the", "tensor", "of", "value", "and", "matrix", "returns"]
    vocabulary = read_vocabulary(subject.data.folder, 12)
    found = continue_words(subject.model, vocabulary, words, Sampling(new_words=9))
    tokens = [vocabulary.index(word) for word in words]
    for word in [one.word for one in found.text if not one.is_prompt]:
        # one block of all that there is, from an empty cache
        with torch.no_grad():
            states = subject.model.initial_states(1, torch.device("cpu"))
            for start in range(0, len(tokens), 3):
                part = torch.tensor([tokens[start : start + 3]])
                (final, _, _), states = subject.model.read(part, states)
            best = int(subject.model.predict(final[:, -1:]).argmax())
        assert vocabulary[best] == word
        tokens.append(best)
    assert [len(one.experts) for one in found.text] == [2] * 17
    assert all(len(layer) == 2 for one in found.text for layer in one.experts)


def test_words_are_drawn_from_the_likeliest():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    probs = logits.double().softmax(0)
    assert sample_token(logits, Sampling(), generator_for(0)) == 1
    generator = generator_for(1)
    every = [sample_token(logits, Sampling(temperature=1.0), generator) for _ in range(4000)]
    counts = np.bincount(every, minlength=4) / 4000
    assert np.abs(counts - probs.numpy()).max() < 0.03
    few = {
        sample_token(logits, Sampling(temperature=1.0, top_p=0.7), generator) for _ in range(200)
    }
    assert few == {1, 2}  # 0.64 alone is less than 0.7
    assert {sample_token(logits, Sampling(temperature=1.0, top_p=1e-9), generator)} == {1}


def test_the_command_prints_words_and_writes_the_page(trained, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = [str(trained), "--prompt", str(prompt(tmp_path)), "--out", str(page), "--words", "5"]
    with pytest.raises(SystemExit, match="^0$"):
        main(words)
    out, err = capsys.readouterr()
    assert len(out.split()) == 5
    assert err.splitlines() == [
        f"how good this model is was not measured: there is no {trained}/score.json",
        "the most probable word each time, seed 0",
        "not in the vocabulary, read as <unk>: unheard, words",
        f"{page}: every word with its experts",
    ]
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>MoE layer") == 2 and text.count('class="added"') == 10
    assert "&lt;eos&gt;" in text and "expert 3" in text


def test_draws_are_those_of_the_seed(subject):
    vocabulary = read_vocabulary(subject.data.folder, 12)
    said = [
        [one.word for one in continue_words(subject.model, vocabulary, ["<eos>"], sampling).text]
        for sampling in (Sampling(12, 1.0, 1.0, seed) for seed in (0, 0, 1))
    ]
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--prompt x --words 0", "Invalid value for '--words'"),
        ("--prompt x --temperature -1", "Invalid value for '--temperature'"),
        ("--prompt x --top-p 1.5", "Invalid value for '--top-p'"),
        ("FOLDER --prompt x", "either FOLDER, or --prompt"),
        ("FOLDER --package os", "--package: found os; allowed: "),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, options, says):
    page = tmp_path / "a.html"
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *options.split(), "--out", str(page)])
    assert says in f"{ended.value} {capsys.readouterr().err}" and not page.exists()


def test_bad_prompts_and_models_are_refused(trained, tmp_path):
    out = tmp_path / "a.html"
    with pytest.raises(UserError, match=r"prompt.txt: found no word"):
        continue_file(trained, prompt(tmp_path, " \n"), out, Sampling())
    with pytest.raises(UserError, match=r"none.txt: No such file"):
        continue_file(trained, tmp_path / "none.txt", out, Sampling())
    pictures = built(Vit(patch=6, width=8, depth=1, heads=1), None, digits(tmp_path / "digits"), 1)
    told = text_subject(Told()).model
    for model, says in (
        (pictures, "found a model of images; --prompt takes one of text"),
        (told, "is routed by the truth, which a prompt "),
    ):
        (tmp_path / "other").mkdir(exist_ok=True)
        save_model(tmp_path / "other", model)
        with pytest.raises(UserError, match=f"^{tmp_path / 'other'}: {says}"):
            continue_file(tmp_path / "other", prompt(tmp_path), out, Sampling())
    assert not out.exists()


def test_the_page_fits(browser, trained, tmp_path):
    page = tmp_path / "page.html"
    continue_file(trained, prompt(tmp_path), page, Sampling(new_words=40))
    with opened(browser, page, 390, "dark") as shown:
        assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert shown.locator("h2").count() == 2
