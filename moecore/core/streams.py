"""Random generators and draws, each a function of seed, step and purpose.

A student's training draws from (seed, epoch) for the order of its images and from (seed, step,
purpose) for everything else; ``seed``, the run's seed, also sets the initial weights. The teacher,
its routers and the measurements use ``derived_seed(owner, seed)`` instead, so they share no stream
with the student or with each other.
"""

import hashlib
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from moecore.core.ranks import rank_and_size

# Purposes of a training step, (seed, step, purpose)
VIEWS = 1
NOISE = 2
ATTACK = 3

# Purposes of numpy's generators, [seed, purpose]; 0 to 2, 5 and 6 split the data
FEW_SHOT = 3
PERMUTED_LABELS = 4  # the permutation of a null control's labels

StreamOwner = Literal[
    "teacher",  # its initial weights, order, views and noise
    "upcycling",  # which hidden units of experts are drawn again, and their weights
    "teacher_router",  # the initial weights and the batches of the teacher's routers
    "measured_views",  # views in routing and explorer
    "measured_tokens",  # tokens at which lipschitz evaluates Lemma 1
    "attacked_images",  # test images that robustness and transfer attack
    "mixed_regions",  # the random control of volumes with one tissue
]


def generator_for(*numbers: int) -> Generator:
    """Return a CPU generator seeded by a hash of integers such as (seed, step, purpose)."""
    # Not numpy's SeedSequence, for which (1, 5) and (1, 5, 0) are the same
    return Generator().manual_seed(_hash_words(*numbers))


# A batch's numbers are all drawn, so an image's numbers do not depend on the number of ranks.
class BatchDraws(NamedTuple):
    """Random numbers for the images of a batch, or for the images at ``rows``."""

    generator: Generator  # on the CPU
    batch_size: int  # images of the complete batch
    rows: Tensor | None = None  # (b,) int64, indices into the batch in any order; None for all

    @classmethod
    def of(cls, source: "Generator | BatchDraws", images: int) -> "BatchDraws":
        if isinstance(source, BatchDraws):
            return source
        return cls(source, images)

    @property
    def image_count(self) -> int:
        return self.batch_size if self.rows is None else len(self.rows)

    def select_rows(self, values: Tensor) -> Tensor:
        """Return the values (b, …) at ``rows``, given the values (batch_size, …) of the batch."""
        return values if self.rows is None else values[self.rows]

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        size = (self.batch_size, *shape)
        return self.select_rows(torch.rand(size, generator=self.generator, dtype=dtype))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        size = (self.batch_size, *shape)
        return self.select_rows(torch.randint(low, high, size, generator=self.generator))


def select_rank_rows(batch: Tensor, views: int) -> Tensor:
    """Return this rank's rows (views · b, …) of ``batch`` (views · B, …); b = B / ranks images."""
    # All first views come before all second views, so the part of two views is not contiguous.
    ranks = rank_and_size()
    if ranks.size == 1:
        return batch
    return batch.unflatten(0, (views, ranks.size, -1))[:, ranks.rank].flatten(0, 1)


def normal_like(values: Tensor, views: int) -> Tensor:
    """Draw N(0, 1) for all ranks; return this rank's rows, shaped as ``values`` (views · b, …)."""
    return select_rank_rows(torch.randn_like(_empty_whole_batch_like(values)), views)


def uniform_like(values: Tensor, views: int) -> Tensor:
    """Draw from [0, 1) for all ranks; return this rank's rows, as ``values`` (views · b, …)."""
    return select_rank_rows(torch.rand_like(_empty_whole_batch_like(values)), views)


def draw_bernoulli_mask(values: Tensor, probability: float, views: int) -> Tensor:
    """Draw 1 with ``probability``, else 0, for all ranks; return this rank's, like ``values``."""
    draws = torch.empty_like(_empty_whole_batch_like(values)).bernoulli_(probability)
    return select_rank_rows(draws, views)


def _empty_whole_batch_like(values: Tensor) -> Tensor:
    """Return a tensor (views · B, …), of any content, for this rank's ``values`` (views · b, …)."""
    size = rank_and_size().size
    if size == 1:
        return values
    return values.new_empty(()).expand(size * values.shape[0], *values.shape[1:])


def derived_seed(owner: StreamOwner, seed: int) -> int:
    """Return the seed, from 0 to 2⁶³ − 1, of the draws of ``owner`` in a run with ``seed``."""
    return _hash_words(owner, seed) >> 1  # valid for torch and numpy


def _hash_words(*values: int | str) -> int:
    return int.from_bytes(hashlib.sha256(",".join(map(str, values)).encode()).digest()[:8], "big")
