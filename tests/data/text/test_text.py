"""Words, vocabularies, windows, streams, sources of text; tokenizers and mosaics of captions."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.data.files.published_source import tokenize_captions
from moecore.data.layouts.text import block_windows
from moecore.data.loader import TextStreams
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources import docstrings, wikitext
from moecore.data.sources.captioned_mosaic import CaptionedMosaic, draw_layouts, layout_captions
from moecore.data.sources.docstrings import Docstrings, extract_docstring_prose
from moecore.data.sources.wikitext import Wikitext
from moecore.data.text import tokenizers
from moecore.data.text.tokenizers import BpeTokenizer, load_tokenizer
from moecore.data.text.words import build_vocabulary, lower_words, number_tokens, read_vocabulary
from moecore.tasks.image_text import NONE, ImageText
from moecore.training.phase_trainings import text_stream_length

SOURCE = '''
"""Read a file and give its lines back, one after the other."""

class Reader:
    """Too short.

    A reader holds a file open, and it closes the file when it is no longer used.

    >>> Reader("x") reads the words of the file x and gives them back to you

    Parameters
    ----------
    name : the name of the file that is to be read, which must exist already
    """

    def read(self):
        "Give back what is left of the file as a list of all of its lines."
        return """No docstring, however long the words of this string may become in the end."""
'''


def test_words_are_lower_case_and_apart_from_punctuation():
    words = "the user's ( x_1 , y ) isn't well-known .".split()
    assert lower_words("The user's (x_1, y) isn't well-known.") == words


def test_rare_words_are_unknown():
    words = build_vocabulary([["b", "a", "b"], ["c", "a", "b"]], 2)
    assert words == ["<eos>", "<unk>", "b", "a"]
    numbers = {word: number for number, word in enumerate(words)}
    assert number_tokens([["a", "c"], []], numbers).tolist() == [3, 1, 0, 0]


def test_only_prose_is_taken_and_nothing_is_imported():
    assert list(extract_docstring_prose(SOURCE)) == [
        "Read a file and give its lines back, one after the other.",
        "A reader holds a file open, and it closes the file when it is no longer used.",
        "Give back what is left of the file as a list of all of its lines.",
    ]


def test_windows_are_blocks_with_what_is_before_them():
    tokens = np.arange(1, 12, dtype=np.int32)
    images, labels = block_windows(tokens, 3, 2)
    assert images.shape == (3, 3, 3) and labels.shape == (3, 3)
    assert images[0].tolist() == [[-1] * 3, [-1] * 3, [1, 2, 3]]
    assert images[2].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert labels.tolist() == [[2, 3, 4], [5, 6, 7], [8, 9, 10]]
    plain, _ = block_windows(tokens, 3, 0)
    assert plain[:, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_streams_are_read_block_after_block_and_again_from_elsewhere():
    text = TextStreams(torch.arange(43, dtype=torch.int32)[None], 4)
    assert text.length(2) == 21 and text.steps(2) == 5
    first = [text.take(2, 0, step) for step in range(5)]
    assert [anew for _, _, anew in first] == [True, False, False, False, False]
    assert first[0][0].tolist() == [[[0, 1, 2, 3]], [[21, 22, 23, 24]]]
    assert first[0][1].tolist() == [[1, 2, 3, 4], [22, 23, 24, 25]]
    assert first[4][1][0].tolist() == [17, 18, 19, 20]
    starts = set()
    for seed in range(8):
        words, _, anew = text.take(2, seed, 5)
        assert anew
        starts.add(int(words[0, 0, 0]))
    assert len(starts) > 1 and starts <= set(range(4))
    own, following, _ = text.take(2, 3, 7, torch.tensor([1]))
    words, labels, _ = text.take(2, 3, 7)
    assert torch.equal(own, words[1:]) and torch.equal(following, labels[1:])


def test_a_test_text_too_short_for_the_batch_is_refused_before_the_training():
    words = {"train": range(1000), "test": range(20)}
    data = SimpleNamespace(
        task=SimpleNamespace(long=True), card={"size": [4]}, tokens=lambda split: words[split]
    )
    assert text_stream_length(data, 3) == 333, "six words each: a block of four and the next word"
    assert text_stream_length(data, 4) == 250
    with pytest.raises(UserError, match="batch is 5, and the text has 20 test tokens; .* 1 to 4 "):
        text_stream_length(data, 5)


def test_docstrings_are_the_same_twice_and_every_file_has_one_split(tmp_path):
    source = Docstrings(packages=("networkx",), block=8, context=1)
    card = source.write(tmp_path / "one")
    assert source.write(tmp_path / "two")["files"] == card["files"]
    data = Prepared.open(tmp_path / "one", verify=True)
    words = read_vocabulary(tmp_path / "one", data.task.outputs)
    assert len(words) == data.task.outputs == len(set(words))
    train = data.tokens("train")
    assert card["tokens"]["train"] == len(train) and 10_000 < len(train)
    counts = np.bincount(train, minlength=len(words))
    assert counts[2:].min() >= 3 and (np.diff(counts[2:]) <= 0).all()
    assert data.test.images.shape == (card["images"]["test"], 2, 8)
    assert np.array_equal(data.test.images[1:, 0], data.test.images[:-1, 1])
    assert card["packages"].keys() == {"networkx"}
    seen = {path for path, _ in docstrings.read_python_files("networkx")}
    assert seen and not any("tests" in path.split("/") for path in seen)


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(UserError, match="packages: found no-such-thing, which is not installed"):
        Docstrings(packages=("no-such-thing",)).write("nowhere")
    assert "no-such-thing" in Docstrings(packages=("no-such-thing",)).describe().problem


def written(folder, train="the cat\n\n the cat sat\n", valid="a cat\n", test="the end\n"):
    folder.mkdir()
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        data = text if isinstance(text, bytes) else text.encode()
        (folder / f"wiki.{name}.tokens").write_bytes(data)
    return Wikitext(root=str(folder), block=2, context=1)


def test_wikitext_is_counted_as_papers_count_it(tmp_path):
    card = written(tmp_path / "raw").write(tmp_path / "out")
    assert read_vocabulary(tmp_path / "out", 7) == "the cat <eos> sat a end <unk>".split()
    with pytest.raises(UserError, match=r"vocabulary.txt: found 7 words; allowed: 8; run the"):
        read_vocabulary(tmp_path / "out", 8)
    train = np.load(tmp_path / "out/train_tokens.npy")
    assert train.tolist() == [0, 1, 2, 2, 0, 1, 3, 2], "an empty line is <eos> alone"
    assert card["tokens"] == {"train": 8, "validation": 3, "test": 3}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train": b"the caf\xe9\n"}, "wiki.train.tokens: after line 0: found 'utf-8' codec"),
        ({"test": ""}, "wiki.test.tokens: found no line; allowed: the words of a text"),
        ({"valid": "a"}, "the split validation has 2 tokens; a block of 2 needs more"),
    ],
)
def test_damaged_text_is_refused(tmp_path, files, said):
    with pytest.raises(UserError, match=said):
        written(tmp_path / "raw", **files).write(tmp_path / "out")


def test_wikitext_103_must_have_its_words(tmp_path):
    source = written(tmp_path / "raw").model_copy(update={"name": "wikitext-103"})
    said = "found 6 words and 8 training tokens; allowed with name wikitext-103: 267,735 and"
    with pytest.raises(UserError, match=said):
        source.write(tmp_path / "out")
    assert wikitext.PRINTED_COUNTS["wikitext-103"] == (267_735, 103_227_021)
    missing = Wikitext(root=str(tmp_path / "nowhere"))
    assert "where a file is missing" in missing.describe().problem


SETTINGS = CaptionedMosaic(
    source={"kind": "digits", "size": 8}, train=300, validation=40, test=50, seed=3
)


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mosaics")
    SETTINGS.write(folder)
    return Prepared.open(folder, verify=True)


def test_captions_say_what_lies_where(mosaics):
    names = mosaics.task.answers
    words = load_tokenizer(mosaics.folder, mosaics.task).vocabulary
    assert names == (f"captions of {mosaics.task.words} words ({mosaics.task.vocabulary[:12]})",)
    layouts = draw_layouts(10, SETTINGS)["test"]
    classes = [str(number) for number in range(10)]
    for image in (0, 17, 49):
        for place, text in enumerate(layout_captions([classes[one] for one in layouts[image]])):
            expected = text.replace(",", " ,").replace(":", " :").replace(";", " ;")
            tokens = mosaics.test.labels[image, place]
            assert " ".join(words[token] for token in tokens if token > 2) == expected


def test_cells_are_images_of_the_class_that_the_caption_names(mosaics, tmp_path):
    SETTINGS.source.write(tmp_path)
    source = Prepared.open(tmp_path)
    layouts = draw_layouts(10, SETTINGS)["test"]
    images = np.asarray(source.test.images)
    for mosaic, layout in zip(mosaics.test.images[:10], layouts, strict=False):
        for place, (row, column) in enumerate(((0, 0), (0, 8), (8, 0), (8, 8))):
            same = (images == mosaic[:, row : row + 8, column : column + 8]).all(axis=(1, 2, 3))
            assert layout[place] in source.test.labels[same]


def test_layouts_of_the_test_are_in_no_other_split_and_there_once():
    found = draw_layouts(10, CaptionedMosaic(source={"kind": "digits"}, train=12_000))
    numbers = {name: rows @ [1000, 100, 10, 1] for name, rows in found.items()}
    assert [len(numbers[split]) for split in SPLITS] == [12_000, 1000, 1000]
    test, validation = set(numbers["test"].tolist()), set(numbers["validation"].tolist())
    assert len(test) == len(validation) == 1000 and not test & validation
    train, counts = np.unique(numbers["train"], return_counts=True)
    assert len(train) == 8000 and not (test | validation) & set(train.tolist())
    assert counts.max() - counts.min() == 1


TASK = ImageText(words=8, context=5, captions=2, end=2, vocabulary="0" * 64)


def test_what_is_too_long_is_cut_and_counted():
    tokenizer = tokenizers.WordTokenizer(["a", "b", "c", "d"])
    labels, counts = tokenize_captions([["A b!", "a b c d a"], ["d"]], tokenizer, TASK)
    cut = [[1, 4, 5, 3, 2], [1, 4, 5, 6, 2]]
    assert labels.tolist() == [cut, [[1, 7, 2, 0, 0], [NONE] * 5]]
    assert counts == {"captions": 3, "cut": 1, "unknown": 1}
    TASK.check(labels, "labels")


def test_a_vocabulary_of_words_is_that_of_the_training_captions():
    found = tokenizers.WordSettings().build(["a dog and a cat", "A cat runs", "dog dog"])
    assert found.vocabulary == tuple("<pad> <start> <end> <unk> a dog cat and runs".split())


def bpe_file(path):
    """A byte-pair vocabulary in the form of CLIP's tokenizer.json, of a few words."""
    words = ("a", "b", "a</w>", "b</w>", "ab</w>", "<|startoftext|>", "<|endoftext|>")
    vocabulary = {word: number for number, word in enumerate(words)}
    special = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for number, name in enumerate(words[5:], 5)
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
    found = tokenizers.BpeFileSettings(file=str(path), words=7).build([])
    assert (found.words, found.end) == (7, 6)
    assert found.encode("AB ba", 8).tokens == [5, 4, 1, 2, 6, 0, 0, 0]
    assert found.encode("ab ab ab", 4) == ([5, 4, 4, 6], True, 0)
    (tmp_path / "model").mkdir()
    found.write(tmp_path / "model")
    task = TASK.model_copy(update={"words": 7, "end": 6, "vocabulary": found.digest})
    assert load_tokenizer(tmp_path / "model", task).digest == found.digest


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
        load_tokenizer(tmp_path, TASK.model_copy(update={"words": 7}))
