"""Random streams: which draws belong to whom, in one place.

A student's training draws from (seed, epoch) for the order of its images and from (seed, step,
purpose) for all else; ``seed`` is that of its run, which sets its first weights too. Whoever else
draws – its teacher, the teacher's routers, a measurement – draws from ``derived_seed(WHO, seed)``
in place of the seed, and so shares no stream with the student of the same number, nor with another.
"""

import hashlib
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from moecore.core.ranks import current_ranks

# Purposes of a training step, (seed, step, purpose)
VIEWS = 1
NOISE = 2
ATTACK = 3

# Purposes of numpy's generators, [seed, purpose]; 0 to 2, 5 and 6 split the data
FEW_SHOT = 3
PERMUTED = 4  # the places of a null control's labels

Who = Literal[
    "teacher",  # its first weights, order, views and noise
    "upcycling",  # which hidden units of experts are drawn anew, and their weights
    "teacher_router",  # the first weights and the batches of the teacher's routers
    "measured_views",  # of routing and explorer
    "measured_tokens",  # of lipschitz: where Lemma 1 is looked at
    "attacked_images",  # which test images robustness and transfer attack
    "mixed_regions",  # the random control of volumes that keep one tissue
]


def generator_for(*words: int) -> Generator:
    """A CPU generator for whole numbers (seed, step, purpose); different words are independent."""
    # SeedSequence takes (1, 5) and (1, 5, 0) for the same
    return Generator().manual_seed(_hash_words(*words))


class BatchDraws(NamedTuple):
    """Random numbers of the images of a batch, or of some of them.

    All numbers of the whole batch are drawn, whichever are wanted: an image's do not depend on how
    many processes share the batch. generator: on the CPU. whole: images of the batch. rows: places
    in it (B,) int64, ascending or not; None for all.
    """

    generator: Generator
    whole: int
    rows: Tensor | None = None

    @classmethod
    def of(cls, source: "Generator | BatchDraws", images: int) -> "BatchDraws":
        """``source`` itself, or the draws of a whole batch of so many images."""
        return source if isinstance(source, BatchDraws) else cls(source, images)

    @property
    def images(self) -> int:
        """Images that are drawn for."""
        return self.whole if self.rows is None else len(self.rows)

    def select_rows(self, values: Tensor) -> Tensor:
        """The rows of values (whole, …) of the whole batch."""
        return values if self.rows is None else values[self.rows]

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """(B, *shape), uniform in [0, 1)."""
        size = (self.whole, *shape)
        return self.select_rows(torch.rand(size, generator=self.generator, dtype=dtype))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(B, *shape) int64 from ``low`` to ``high`` − 1."""
        size = (self.whole, *shape)
        return self.select_rows(torch.randint(low, high, size, generator=self.generator))


class RowsOfBatch:
    """Which rows of the whole batch this rank's tokens are, while a step is computed.

    A step has ``views`` views of each image, all first views before all second ones, so a rank's
    part of a batch of two views is not one piece of it.
    """

    views = 1

    @classmethod
    def of(cls, whole: Tensor) -> Tensor:
        """This rank's part (views · b, …) of the whole batch (views · B, …)."""
        here = current_ranks()
        if here.size == 1:
            return whole
        parted = whole.unflatten(0, (cls.views, here.size, -1))
        return parted[:, here.rank].flatten(0, 1)


def normal_like(values: Tensor) -> Tensor:
    """This rank's part of the whole batch's normal draws for ``values`` (views · b, …)."""
    return RowsOfBatch.of(torch.randn_like(_whole_batch_like(values)))


def uniform_like(values: Tensor) -> Tensor:
    """Uniform draws in [0, 1) for ``values`` (views · b, …), drawn as ``normal_like`` does."""
    return RowsOfBatch.of(torch.rand_like(_whole_batch_like(values)))


def draw_bernoulli_mask(values: Tensor, probability: float) -> Tensor:
    """Return 0 or 1 for ``values`` (views · b, …), drawn as in ``normal_like``."""
    return RowsOfBatch.of(torch.empty_like(_whole_batch_like(values)).bernoulli_(probability))


def _whole_batch_like(values: Tensor) -> Tensor:
    """Something of the whole batch's shape, whose memory is never touched."""
    size = current_ranks().size
    if size == 1:
        return values
    return values.new_empty(()).expand(size * values.shape[0], *values.shape[1:])


def derived_seed(who: Who, seed: int) -> int:
    """The seed, from 0 to 2⁶³ − 1, that ``who`` draws from in the run of ``seed``."""
    return _hash_words(who, seed) >> 1  # torch and numpy both take it


def _hash_words(*words: int | str) -> int:
    digest = hashlib.sha256(",".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "big")
