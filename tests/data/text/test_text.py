import functools
import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moecore.core.files import UserError, file_checksum, join_below_root
from moecore.data import loader, prepared
from moecore.data.files.published_source import (
    check_digest,
    download_file,
    tokenize_and_count_captions,
)
from moecore.data.layouts.text import cut_labelled_blocks
from moecore.data.sources import docstrings, fashion_mnist, wikitext
from moecore.data.sources.captioned_mosaic import CaptionedMosaic, draw_layouts, layout_captions
from moecore.data.sources.docstrings import Docstrings, extract_docstring_prose
from moecore.data.sources.fashion_mnist import FashionMnist, read_idx
from moecore.data.sources.wikitext import Wikitext
from moecore.data.text import tokenizers
from moecore.data.text.tokenizers import BpeTokenizer, load_tokenizer
from moecore.data.text.words import build_vocabulary, lower_words, read_vocabulary, tokenize_lines
from moecore.tasks.image_text import NO_CAPTION, ImageText
from moecore.training.phase_trainings import compute_stream_length
from tests.data.making import fashion_folder, idx_bytes

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
SMALL = {"kind": "digits", "size": 8}
SETTINGS = CaptionedMosaic(source=SMALL, train=300, validation=40, test=50, seed=3)
TASK = ImageText(words=8, context=5, captions=2, end=2, vocabulary="0" * 64)
IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_words_are_lower_case_apart_from_punctuation_and_unknown_where_rare():
    words = "the user's ( x_1 , y ) isn't well-known .".split()
    assert lower_words("The user's (x_1, y) isn't well-known.") == words
    words = build_vocabulary([["b", "a", "b"], ["c", "a", "b"]], 2)
    assert words == ["<eos>", "<unk>", "b", "a"]
    numbers = {word: number for number, word in enumerate(words)}
    assert tokenize_lines([["a", "c"], []], numbers).tolist() == [3, 1, 0, 0]


def test_only_prose_is_taken_and_nothing_is_imported():
    assert list(extract_docstring_prose(SOURCE)) == [
        "Read a file and give its lines back, one after the other.",
        "A reader holds a file open, and it closes the file when it is no longer used.",
        "Give back what is left of the file as a list of all of its lines.",
    ]


def test_windows_are_blocks_with_what_is_before_them():
    tokens = np.arange(1, 12, dtype=np.int32)
    images, labels = cut_labelled_blocks(tokens, 3, 2)
    assert images.shape == (3, 3, 3) and labels.shape == (3, 3)
    assert images[0].tolist() == [[-1] * 3, [-1] * 3, [1, 2, 3]]
    assert images[2].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert labels.tolist() == [[2, 3, 4], [5, 6, 7], [8, 9, 10]]
    plain, _ = cut_labelled_blocks(tokens, 3, 0)
    assert plain[:, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_streams_are_read_block_after_block_and_again_from_elsewhere():
    text = loader.TextStreams(torch.arange(43, dtype=torch.int32)[None], 4)
    assert text.length(2) == 21 and text.steps_per_pass(2) == 5
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
    task = SimpleNamespace(long=True)
    data = SimpleNamespace(task=task, card={"size": [4]}, tokens=lambda split: words[split])
    assert compute_stream_length(data, 3) == 333, (
        "six words each: a block of four and the next word"
    )
    assert compute_stream_length(data, 4) == 250
    with pytest.raises(UserError, match="batch is 5, and the text has 20 test tokens; .* 1 to 4 "):
        compute_stream_length(data, 5)


def test_docstrings_are_the_same_twice_and_every_file_has_one_split(tmp_path):
    source = Docstrings(packages=("networkx",), block=8, context=1)
    card = source.write(tmp_path / "one")
    assert source.write(tmp_path / "two")["files"] == card["files"]
    data = prepared.Prepared.open(tmp_path / "one", verify=True)
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
    assert wikitext.PUBLISHED_COUNTS["wikitext-103"] == (267_735, 103_227_021)
    assert "where a file is missing" in Wikitext(root=str(tmp_path / "nowhere")).describe().problem


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mosaics")
    SETTINGS.write(folder)
    return prepared.Prepared.open(folder, verify=True)


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
    source = prepared.Prepared.open(tmp_path)
    layouts = draw_layouts(10, SETTINGS)["test"]
    images = np.asarray(source.test.images)
    for mosaic, layout in zip(mosaics.test.images[:10], layouts, strict=False):
        for place, (row, column) in enumerate(((0, 0), (0, 8), (8, 0), (8, 8))):
            same = (images == mosaic[:, row : row + 8, column : column + 8]).all(axis=(1, 2, 3))
            assert layout[place] in source.test.labels[same]


def test_layouts_of_the_test_are_in_no_other_split_and_there_once():
    found = draw_layouts(10, CaptionedMosaic(source={"kind": "digits"}, train=12_000))
    numbers = {name: rows @ [1000, 100, 10, 1] for name, rows in found.items()}
    assert [len(numbers[split]) for split in prepared.SPLITS] == [12_000, 1000, 1000]
    test, validation = set(numbers["test"].tolist()), set(numbers["validation"].tolist())
    assert len(test) == len(validation) == 1000 and not test & validation
    train, counts = np.unique(numbers["train"], return_counts=True)
    assert len(train) == 8000 and not (test | validation) & set(train.tolist())
    assert counts.max() - counts.min() == 1


def test_captions_are_cut_and_counted_by_words_of_the_training_captions():
    tokenizer = tokenizers.WordTokenizer(["a", "b", "c", "d"])
    labels, counts = tokenize_and_count_captions([["A b!", "a b c d a"], ["d"]], tokenizer, TASK)
    assert labels.tolist() == [
        [[1, 4, 5, 3, 2], [1, 4, 5, 6, 2]],
        [[1, 7, 2, 0, 0], [NO_CAPTION] * 5],
    ]
    assert counts == {"captions": 3, "cut": 1, "unknown": 1}
    TASK.check(labels, "labels")
    found = tokenizers.WordSettings().build(["a dog and a cat", "A cat runs", "dog dog"])
    assert found.vocabulary == tuple("<pad> <start> <end> <unk> a dog cat and runs".split())


def bpe_file(path):
    """A byte-pair vocabulary in the form of CLIP's tokenizer.json, of a few words."""
    words = ("a", "b", "a</w>", "b</w>", "ab</w>", "<|startoftext|>", "<|endoftext|>")
    vocabulary = {word: number for number, word in enumerate(words)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["special"] = True
    special = [{"id": i, "content": name} | flags for i, name in enumerate(words[5:], 5)]
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


@given(
    arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
)
def test_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.mktemp("idx") / "file"
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if packed else content)
    read = read_idx(path, array.ndim, hashlib.sha256(content).hexdigest())
    assert read.dtype == np.uint8 and np.array_equal(read, array)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (idx_bytes(IMAGES)[:-1], "has sha256"),
        (gzip.compress(idx_bytes(IMAGES))[:-9], "cannot be read"),
        (b"another file", "has sha256"),
        (gzip.compress(bytes(2**27), 1), "found more than 67,108,864 bytes"),
        (None, "No such file"),
    ],
    ids=["truncated", "truncated gzip", "foreign", "gzip of zeros", "missing"],
)
def test_damage_is_named(tmp_path, content, said):
    path = tmp_path / "train-images-idx3-ubyte"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_idx(path, 3, hashlib.sha256(idx_bytes(IMAGES)).hexdigest())
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)


class Handler(BaseHTTPRequestHandler):
    """Serves the files of ``folder``; /short promises more than it sends."""

    def __init__(self, folder, *args):
        self.folder = folder
        super().__init__(*args)

    def do_GET(self):
        path = self.folder / self.path.lstrip("/")
        content = path.read_bytes() if path.is_file() else None
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"") + 100 * (self.path == "/short")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, folder))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{http.server_port}/"
    http.shutdown()
    http.server_close()


def test_checked_and_whole(server, tmp_path):
    folder, url = server
    (folder / "file").write_bytes(b"content" * 1000)
    digest = hashlib.md5(b"content" * 1000).hexdigest()
    place = tmp_path / "deep/file"
    download_file(url + "file", place, lambda path: check_digest(path, "md5", digest, url))
    assert file_checksum(place, "md5") == digest


@pytest.mark.parametrize("name", ["file", "short", "absent"])
def test_every_failure_leaves_nothing(server, tmp_path, name):
    folder, url = server
    for file in ("file", "short"):
        (folder / file).write_bytes(b"tampered with")
    place = tmp_path / "here/file"
    with pytest.raises(UserError, match=f"{url}{name}: "):
        download_file(url + name, place, lambda path: check_digest(path, "md5", "abc", url + name))
    assert not list((tmp_path / "here").iterdir())


def test_fashion_mnist_is_fetched_and_checked(server, tmp_path, monkeypatch):
    folder, url = server
    monkeypatch.setattr(fashion_mnist, "URL", url)
    monkeypatch.setattr(fashion_mnist, "SHA256", fashion_folder(folder))
    settings = FashionMnist(root=str(tmp_path / "raw"), download=True)
    assert sum(settings.write(tmp_path / "out")["counts"]["test"].values()) == 60
    assert len(list((tmp_path / "raw").iterdir())) == 4
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9/")
    settings.write(tmp_path / "again")  # found on disk: no second download


def test_a_relative_folder_is_not_put_before_its_files_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("pictures/a.png")
    file.parent.mkdir()
    file.touch()
    folder = Path("pictures")
    assert join_below_root(folder, file) == join_below_root(folder, "a.png") == file
    assert join_below_root(Path("."), file) == file
    with pytest.raises(UserError, match="which leads out of this folder"):
        join_below_root(Path("pictures"), "../pictures/a.png")
