"""Text in ciphers: dialects of words, for which the right expert of every word is known."""

from typing import Literal

import numpy as np
from pydantic import Field

from moecore.data.card import SPLITS, Card
from moecore.data.layouts.text import END, UNKNOWN, TokenizedText
from moecore.data.sources.dialects import NAMES_STREAM, STREAM, check_rarest_dialect, zipf_shares
from moecore.data.sources.docstrings import DocstringSourceBase
from moecore.data.text.words import lower_words


class Ciphers(DocstringSourceBase):
    """Text of docstrings, each paragraph encrypted by one of D ciphers.

    A cipher permutes all words of the vocabulary except ``<eos>`` and ``<unk>``. A word's kind is
    its paragraph's cipher; ``<eos>`` has kind 0, since the next cipher is not known there.
    """

    kind: Literal["ciphers"] = "ciphers"
    words: int | None = Field(None, ge=3, description="Vocabulary size V; rarer: <unk>; null: all")
    dialects: int = Field(12, ge=1, le=255, description="Number of ciphers D")
    zipf: float = Field(0.0, ge=0, description="Cipher n occurs ∝ n^−zipf; 0: equally often")
    seed: int = Field(0, ge=0, description="Draws the ciphers, and the cipher of each paragraph")

    def describe(self) -> Card:
        card = super().describe()
        return card._replace(name=f"{card.name} in {self.dialects} ciphers", truth=self.dialects)

    def read(self) -> TokenizedText:
        return self.encrypt(super().read())

    def paragraph_duplicate_key(self, paragraph: str) -> str:
        """Return a paragraph's lower-case words, by which duplicate paragraphs are found."""
        return " ".join(lower_words(paragraph))

    def encrypt(self, plain: TokenizedText) -> TokenizedText:
        # ``truth``: each word's cipher, from 1; 0 at ``<eos>``.
        vocabulary = plain.vocabulary[: self.words]
        end, unknown = special = [vocabulary.index(word) for word in (END, UNKNOWN)]
        shares = zipf_shares(self.dialects, self.zipf)
        check_rarest_dialect(self.zipf, shares, int((plain.tokens["train"] == end).sum()))
        ciphers = draw_word_ciphers(self.dialects, len(vocabulary), special, self.seed)
        tokens, truth = {}, {}
        for stream, split in enumerate(SPLITS):
            plain_words = plain.tokens[split]
            plain_words = np.where(plain_words < len(vocabulary), plain_words, unknown)
            ends = plain_words == end
            paragraphs = ends.cumsum() - ends
            random = np.random.default_rng([self.seed, STREAM + stream])
            choices = random.choice(self.dialects, size=paragraphs[-1] + 1, p=shares)
            cipher_of_word = choices[paragraphs]
            tokens[split] = ciphers[cipher_of_word, plain_words]
            truth[split] = np.where(ends, 0, cipher_of_word + 1).astype(np.uint8)
        return TokenizedText(tokens, vocabulary, plain.more, truth)


def draw_word_ciphers(dialects: int, words: int, special: list[int], seed: int) -> np.ndarray:
    """Draw D permutations of V tokens, int32 (D, V), that do not move the ``special`` tokens."""
    random = np.random.default_rng([seed, NAMES_STREAM])
    ordinary = np.setdiff1d(np.arange(words), special)
    ciphers = np.tile(np.arange(words, dtype=np.int32), (dialects, 1))
    for cipher in ciphers:
        cipher[ordinary] = random.permutation(ordinary)
    return ciphers
