"""Tokenizers of captions, and mosaics whose captions say what they show."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.captioned_mosaic import CaptionedMosaic, captions_of, drawn_layouts
from moecore.data.text.captions import tokens_of
from moecore.data.text.tokenizers import (
    BpeSettings,
    BpeTokenizer,
    WordSettings,
    WordTokenizer,
    tokenizer_in,
)
from moecore.tasks.image_text import NONE, ImageText

SETTINGS = CaptionedMosaic(
    source={"kind": "digits", "size": 8}, train=300, validation=40, test=50, seed=3
)


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mosaics")
    SETTINGS.prepare(folder)
    return Prepared.open(folder, verify=True)


def spoken(data: Prepared, tokens) -> str:
    words = tokenizer_in(data.folder, data.task).vocabulary
    return " ".join(words[token] for token in tokens if token > 2)


def test_captions_say_what_lies_where(mosaics):
    names = mosaics.task.answers
    assert names == (f"captions of {mosaics.task.words} words ({mosaics.task.vocabulary[:12]})",)
    layouts = drawn_layouts(10, SETTINGS)["test"]
    classes = [str(number) for number in range(10)]
    for image in (0, 17, 49):
        for place, text in enumerate(captions_of([classes[one] for one in layouts[image]])):
            expected = text.replace(",", " ,").replace(":", " :").replace(";", " ;")
            assert spoken(mosaics, mosaics.test.labels[image, place]) == expected


def test_cells_are_images_of_the_class_that_the_caption_names(mosaics, tmp_path):
    SETTINGS.source.prepare(tmp_path)
    source = Prepared.open(tmp_path)
    layouts = drawn_layouts(10, SETTINGS)["test"]
    images = np.asarray(source.test.images)
    for mosaic, layout in zip(mosaics.test.images[:10], layouts, strict=False):
        for place, (row, column) in enumerate(((0, 0), (0, 8), (8, 0), (8, 8))):
            cell = mosaic[:, row : row + 8, column : column + 8]
            same = (images == cell).all(axis=(1, 2, 3))
            assert layout[place] in source.test.labels[same]


def test_layouts_of_the_test_are_in_no_other_split_and_there_once():
    found = drawn_layouts(10, CaptionedMosaic(source={"kind": "digits"}, train=12_000))
    numbers = {name: rows @ [1000, 100, 10, 1] for name, rows in found.items()}
    assert [len(numbers[split]) for split in SPLITS] == [12_000, 1000, 1000]
    test, validation = set(numbers["test"].tolist()), set(numbers["validation"].tolist())
    assert len(test) == len(validation) == 1000 and not test & validation
    train, counts = np.unique(numbers["train"], return_counts=True)
    assert len(train) == 8000 and not (test | validation) & set(train.tolist())
    assert counts.max() - counts.min() == 1


def test_a_mosaic_needs_layouts_that_are_left_for_training():
    with pytest.raises(ValidationError, match="validation and test are 10000 mosaics; allowed"):
        CaptionedMosaic(source={"kind": "digits"}, validation=5000, test=5000)


TASK = ImageText(words=8, context=5, captions=2, end=2, vocabulary="0" * 64)


def test_what_is_too_long_is_cut_and_counted():
    tokenizer = WordTokenizer(["a", "b", "c", "d"])
    labels, counts = tokens_of([["A b!", "a b c d a"], ["d"]], tokenizer, TASK)
    assert labels.tolist() == [
        [[1, 4, 5, 3, 2], [1, 4, 5, 6, 2]],
        [[1, 7, 2, 0, 0], [NONE] * 5],
    ]
    assert counts == {"captions": 3, "cut": 1, "unknown": 1}
    TASK.check(labels, "labels")


def test_a_vocabulary_of_words_is_that_of_the_training_captions():
    found = WordSettings(least=2).build(["a dog and a cat", "A cat runs", "dog dog"])
    assert found.vocabulary == ("<pad>", "<start>", "<end>", "<unk>", "a", "dog", "cat")


def bpe_file(path, words=("a", "b", "ab</w>")):
    """A byte-pair vocabulary in the form of CLIP's tokenizer.json, of a few words."""
    vocabulary = {
        word: number for number, word in enumerate(("a", "b", "a</w>", "b</w>", "ab</w>"))
    }
    vocabulary |= {"<|startoftext|>": 5, "<|endoftext|>": 6}
    special = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for name, number in (("<|startoftext|>", 5), ("<|endoftext|>", 6))
    ]
    model = {"type": "BPE", "dropout": None, "unk_token": "<|endoftext|>", "fuse_unk": False}
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": "</w>", "byte_fallback": False}
    model |= {"vocab": vocabulary, "merges": ["a b</w>"]}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special}
    content |= {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}}
    content |= {"post_processor": None, "decoder": None, "model": model}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_byte_pairs_of_a_file(tmp_path):
    path = bpe_file(tmp_path / "tokenizer.json")
    found = BpeSettings(file=str(path), words=7).build([])
    assert (found.words, found.end) == (7, 6)
    assert found.encode("AB ba", 8).tokens == [5, 4, 1, 2, 6, 0, 0, 0]
    assert found.encode("ab ab ab", 4) == ([5, 4, 4, 6], True, 0)
    (tmp_path / "model").mkdir()
    found.write(tmp_path / "model")
    task = TASK.model_copy(update={"words": 7, "end": 6, "vocabulary": found.digest})
    assert tokenizer_in(tmp_path / "model", task).digest == found.digest


def test_vocabularies_that_are_none_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"none\.json: no such file; allowed: a tokenizer.json"):
        BpeTokenizer(tmp_path / "none.json", 7)
    torn = tmp_path / "torn.json"
    torn.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"torn\.json: not a tokenizer\.json"):
        BpeTokenizer(torn, 7)
    path = bpe_file(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="found 7 words; allowed: 49,408, as tokenizer.words says"):
        BpeTokenizer(path, 49_408)
    with pytest.raises(UserError, match="another vocabulary than the model's"):
        tokenizer_in(tmp_path, TASK.model_copy(update={"words": 7}))


def test_labels_come_as_the_task_stores_them(mosaics):
    labels = mosaics.train.labels
    assert labels.shape == (300, 5, 36) and labels.dtype == np.int32
    assert mosaics.card["counts"]["train"] == {"captions": 1500, "cut": 0, "unknown": 0}
    torch.testing.assert_close(
        torch.from_numpy((labels == mosaics.task.end).sum(-1)),
        torch.ones(300, 5, dtype=torch.int64),
    )
