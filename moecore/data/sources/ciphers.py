"""Text in ciphers: dialects of words, in which the right expert of every word is known.

V words of the vocabulary, D dialects.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from moecore.data.card import SPLITS, Card
from moecore.data.layouts.text import END, UNKNOWN, NumberedText
from moecore.data.sources.dialects import NAMES, STREAM, check_rarest_dialect, zipf_shares
from moecore.data.sources.docstrings import DocstringSource
from moecore.data.text.words import lower_words


class Ciphers(DocstringSource):
    """The docstrings, each paragraph in one of D ciphers: each exchanges all words of the
    vocabulary in its own way, but for ``<eos>`` and ``<unk>``.

    A word's kind is its paragraph's cipher; that of ``<eos>``, which no cipher follows yet, is 0.
    """

    kind: Literal["ciphers"] = "ciphers"
    words: int | None = Field(
        None, ge=3, description="Vocabulary V: the most frequent, others are <unk>; null: all"
    )
    dialects: int = Field(12, ge=1, le=255, description="Number of ciphers D")
    zipf: float = Field(
        0.0, ge=0, description="Cipher n occurs in proportion to n to the power of −this; 0: alike"
    )
    seed: int = Field(0, ge=0, description="Draws ciphers, and each paragraph's")

    def describe(self) -> Card:
        """Return what ``write`` would write; how many words there are is not known before."""
        card = super().describe()
        return card._replace(name=f"{card.name} in {self.dialects} ciphers", truth=self.dialects)

    def read(self) -> NumberedText:
        """Return the text of all splits in ciphers; UserError where a package lacks."""
        return self.encrypt(super().read())

    def identify_paragraph(self, paragraph: str) -> str:
        """Return its words, so that no paragraph of the test is in training in any cipher."""
        return " ".join(lower_words(paragraph))

    def encrypt(self, plain: NumberedText) -> NumberedText:
        """Return a text in ciphers, with the truth; UserError where one has too few paragraphs."""
        vocabulary = plain.vocabulary[: self.words]
        end, unknown = special = [vocabulary.index(word) for word in (END, UNKNOWN)]
        shares = zipf_shares(self.dialects, self.zipf)
        check_rarest_dialect(self.zipf, shares, int((plain.tokens["train"] == end).sum()))
        ciphers = draw_word_ciphers(self.dialects, len(vocabulary), special, self.seed)
        tokens, truth = {}, {}
        for place, split in enumerate(SPLITS):
            words = np.where(plain.tokens[split] < len(vocabulary), plain.tokens[split], unknown)
            ends = words == end
            paragraphs = ends.cumsum() - ends
            random = np.random.default_rng([self.seed, STREAM + place])
            spoken = random.choice(self.dialects, size=paragraphs[-1] + 1, p=shares)[paragraphs]
            tokens[split] = ciphers[spoken, words]
            truth[split] = np.where(ends, 0, spoken + 1).astype(np.uint8)
        return NumberedText(tokens, vocabulary, plain.more, truth)


def draw_word_ciphers(dialects: int, words: int, special: list[int], seed: int) -> np.ndarray:
    """Return the word that stands for each word in each cipher, int32 (D, V); special ones stay."""
    random = np.random.default_rng([seed, NAMES])
    ordinary = np.setdiff1d(np.arange(words), special)
    ciphers = np.tile(np.arange(words, dtype=np.int32), (dialects, 1))
    for cipher in ciphers:
        cipher[ordinary] = random.permutation(ordinary)
    return ciphers
