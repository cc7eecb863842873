"""Points near random subspaces; the label is a direction within the point's subspace."""

from typing import Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.sources.base import LICENCE, DrawnImages, DrawnSource
from moecore.tasks.classification import Classification

MAX_DEVIATIONS = 4.0  # standard deviations of a pixel that are stored unclipped


class Subspaces(DrawnSource):
    """Images of the form B_k z + noise: B_k one of D random orthonormal bases, z r normal numbers.

    The label is the index of z's largest entry; models do not see k, the image's kind. An image and
    its negative are equally likely, so a linear router never sends both to one expert.
    """

    kind: Literal["subspaces"] = "subspaces"
    subspaces: int = Field(16, ge=1, le=255, description="Number of subspaces D")
    rank: int = Field(4, ge=2, le=100, description="Rank r of each subspace, and number of classes")
    size: int = Field(6, ge=2, le=64, description="Side of an image S, pixels")
    noise: float = Field(0.1, ge=0, le=10, description="Expected norm of noise / norm of signal")

    @property
    def uncounted_card(self) -> Card:
        name = f"{self.subspaces} subspaces of rank {self.rank}"
        paper = "drawn; ours, for the bases of ERMoE"
        task = Classification(classes=tuple(map(str, range(self.rank))))  # directions of a basis
        return Card(name, 1, self.size, task, LICENCE, paper, truth=self.subspaces)

    def draw_rule(self, random: np.random.Generator) -> np.ndarray:
        """Draw the bases (D, d, r). Raises UserError where an image has fewer than r pixels."""
        dimension = self.size**2
        if self.rank > dimension:
            raise UserError.at("rank", found=self.rank, allowed=f"at most {dimension} pixels")
        return np.linalg.qr(random.standard_normal((self.subspaces, dimension, self.rank)))[0]

    def draw_images(
        self, rule: np.ndarray, number: int, random: np.random.Generator
    ) -> DrawnImages:
        """Draw values (number, S, S), where 1 is four SDs of a pixel, labels and subspaces."""
        kinds = random.integers(self.subspaces, size=number)
        coordinates = random.standard_normal((number, self.rank))
        deviation = (self.rank / self.size**2) ** 0.5  # of a pixel, over subspaces
        noise = random.normal(0, self.noise * deviation, (number, self.size**2))
        points = np.einsum("ndr,nr->nd", rule[kinds], coordinates) + noise
        largest = MAX_DEVIATIONS * deviation * (1 + self.noise**2) ** 0.5
        values = (points / largest).reshape(number, self.size, self.size)
        return values, coordinates.argmax(axis=1), kinds
