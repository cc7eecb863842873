"""The source `ciphers`: words and truth by hand, undone, foreseen, refused."""

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.data.loader import TextStreams
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources import ciphers
from moecore.data.sources.ciphers import Ciphers, draw_word_ciphers
from moecore.data.text.words import END, UNKNOWN, NumberedText, write_text

VOCABULARY = (END, UNKNOWN, "a", "b", "c", "d")
LINES = [[2, 3, 1, 0], [4, 0], [5, 5, 2, 0]]  # three paragraphs
SMALL = {"block": 4, "context": 1}


def numbered(lines: list[list[int]] = LINES, times: int = 60) -> NumberedText:
    """Return the same paragraphs, over and over, in each split."""
    words = np.array([word for line in lines for word in line] * times, dtype=np.int32)
    return NumberedText(dict.fromkeys(SPLITS, words), VOCABULARY, dict.fromkeys(ABOUT, "x"))


ABOUT = ("name", "licence", "source")


def test_a_cipher_exchanges_all_words_but_the_special_ones():
    drawn = draw_word_ciphers(3, 100, [0, 7], 0)
    assert drawn.dtype == np.int32 and (drawn[:, [0, 7]] == [0, 7]).all()
    assert (np.sort(drawn, axis=1) == np.arange(100)).all()
    assert len(np.unique(drawn, axis=0)) == 3
    assert np.array_equal(drawn, draw_word_ciphers(3, 100, [0, 7], 0))
    assert not np.array_equal(drawn, draw_word_ciphers(3, 100, [0, 7], 1))


def test_words_and_truth_by_hand(monkeypatch):
    """Cipher 1 makes a b c d to b a d c, cipher 2 to d c b a; paragraphs are in 2, 1, 2, 2, …"""
    table = np.array([[0, 1, 3, 2, 5, 4], [0, 1, 5, 4, 3, 2]], dtype=np.int32)
    monkeypatch.setattr(ciphers, "draw_word_ciphers", lambda *_: table)
    written = Ciphers(dialects=2, **SMALL).encrypt(numbered())
    said = []
    for split in SPLITS:
        words, kinds = written.tokens[split], written.truth[split]
        assert words.dtype == np.int32 and kinds.dtype == np.uint8
        assert not kinds[words == 0].any(), "no cipher follows <eos> yet"
        own = [kinds[start] for start in np.flatnonzero(np.append(True, words[:-1] == 0))]
        expected = [
            [[word if word < 2 else int(table[kind - 1, word]) for word in line], kind]
            for line, kind in zip(LINES * 60, own, strict=True)
        ]
        assert words.tolist() == [word for line, _ in expected for word in line]
        assert kinds.tolist() == [kind if word else 0 for line, kind in expected for word in line]
        said.append(own)
    assert 60 < sum(kind == 2 for kind in said[0]) < 120 and said[0] != said[1]
    assert written.about["truth"] == 2 and written.about["name"] == "x in 2 ciphers"


def test_undone_each_split_is_the_docstrings_own(tmp_path):
    source = Ciphers(packages=("networkx",), dialects=3, zipf=0.5, **SMALL)
    source.prepare(tmp_path)
    data, plain = Prepared.open(tmp_path, verify=True), source.read()
    back = draw_word_ciphers(3, data.task.outputs, [0, 1], 0).argsort(axis=1)
    lines = {}
    for split in SPLITS:
        words, kinds = data.text_rows(split)
        assert np.array_equal(back[kinds.clip(1) - 1, words], plain.tokens[split])
        ends = np.flatnonzero(plain.tokens[split] == 0) + 1
        paragraphs = np.split(plain.tokens[split], ends)[:-1]
        lines[split] = {tuple(line) for line in paragraphs if 1 not in line}
        assert (np.diff(np.bincount(kinds)[1:]) < 0).all(), "a later cipher is rarer"
    assert not lines["train"] & lines["test"], "no test paragraph in training, in any cipher"
    foreseen = source.preview()
    assert foreseen.problem is None
    assert (foreseen.name, foreseen.truth, foreseen.channels, list(foreseen.size)) == (
        *(data.card[key] for key in ("name", "truth", "channels", "size")),
    )


def test_windows_and_streams_say_the_kinds_after_the_words(tmp_path):
    written = Ciphers(dialects=2, **SMALL).encrypt(numbered())
    write_text(tmp_path, Ciphers(dialects=2, **SMALL), written)
    data = Prepared.open(tmp_path)
    words, kinds = written.tokens["test"], written.truth["test"]
    assert data.test.images.shape == (149, 4, 4)
    assert data.test.images[0].tolist()[::2] == [[-1] * 4] * 2
    assert data.test.images[5].tolist() == [
        part[start : start + 4].tolist() for part in (words, kinds) for start in (16, 20)
    ]
    assert np.array_equal(data.test.labels[5], words[21:25])
    read, following, _ = TextStreams(torch.from_numpy(data.text_rows("train")), 4).take(2, 0, 1)
    train = [written.tokens["train"], written.truth["train"]]
    assert read[1].tolist() == [part[304:308].tolist() for part in train]
    assert following[1].tolist() == train[0][305:309].tolist()


def test_rare_words_are_unknown():
    written = Ciphers(dialects=2, words=4, **SMALL).encrypt(numbered())
    words = written.tokens["test"]
    assert written.vocabulary == VOCABULARY[:4] and words.max() == 3
    hidden = [line.count(4) + line.count(5) + line.count(1) for line in LINES]
    assert (words == 1).sum() == 60 * sum(hidden)
    assert written.truth["test"][words == 1].all(), "an unknown word is of its paragraph's cipher"


def test_a_cipher_of_too_few_paragraphs_is_refused():
    with pytest.raises(UserError, match="zipf: found 3.0, which leaves about 2 of the last dial"):
        Ciphers(dialects=4, zipf=3.0, **SMALL).encrypt(numbered())
