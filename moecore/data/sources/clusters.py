"""Generated clusters of images for theory of mixtures (Chen et al. 2022, definition 3.1)."""

from typing import Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.sources.base import LICENCE, DrawnImages, DrawnSource
from moecore.tasks.classification import Classification

PAPER = "drawn; Chen et al. 2022 (arXiv 2208.02813), definition 3.1"
SIGNAL_RANGE = (0.5, 2.0)  # range of α and γ, uniform; the paper's third setting, with equal ranges
CENTRE_RANGE = (1.0, 2.0)  # range of β


class Clusters(DrawnSource):
    """Images of K clusters, labelled by a random sign; another cluster's feature disturbs each.

    Each cluster k has two random unit vectors of d numbers, its feature and its centre. Its images
    have P = g² patches of d = p² pixels, in random order: one is y·α times the feature of k, one β
    times its centre, one ε·γ times the feature of another cluster, the others are noise. y and ε
    are −1 or 1, α, β, γ factors, all random. The label is y; models do not see k, the image's kind.
    """

    kind: Literal["clusters"] = "clusters"
    clusters: int = Field(4, ge=2, le=255, description="Number of clusters K")
    patch: int = Field(7, ge=2, le=64, description="Side of a patch p, pixels")
    grid: int = Field(2, ge=2, le=16, description="Patches along each side of an image")
    noise: float = Field(1.0, ge=0, le=10, description="Mean norm of patch noise; centres: 1 to 2")

    @property
    def uncounted_card(self) -> Card:
        name = f"{self.clusters} clusters"
        side = self.grid * self.patch
        task = Classification(classes=("-1", "+1"))
        return Card(name, 1, side, task, LICENCE, PAPER, truth=self.clusters)

    def draw_rule(self, random: np.random.Generator) -> np.ndarray:
        """Draw orthonormal directions (2, K, d) of features and centres; UserError if d < 2K."""
        dimension = self.patch**2
        if 2 * self.clusters > dimension:
            raise UserError.at(
                "clusters",
                found=self.clusters,
                allowed=f"at most {dimension // 2}, half of a patch's {dimension} pixels",
            )
        vectors = random.standard_normal((dimension, 2 * self.clusters))
        return np.linalg.qr(vectors)[0].T.reshape(2, self.clusters, dimension)

    def draw_images(
        self, rule: np.ndarray, number: int, random: np.random.Generator
    ) -> DrawnImages:
        """Draw values (number, S, S), a signal within ±1 plus noise; also labels and clusters."""
        dimension = self.patch**2
        features, centres = rule
        labels, signs = random.integers(2, size=(2, number))
        kinds = random.integers(self.clusters, size=number)
        disturbing = (kinds + random.integers(1, self.clusters, size=number)) % self.clusters
        alpha, gamma = random.uniform(*SIGNAL_RANGE, size=(2, number))
        beta = random.uniform(*CENTRE_RANGE, size=number)
        patches = random.normal(0, self.noise / dimension**0.5, (number, self.grid**2, dimension))
        patches[:, 0] = ((2 * labels - 1) * alpha)[:, None] * features[kinds]
        patches[:, 1] = beta[:, None] * centres[kinds]
        patches[:, 2] = ((2 * signs - 1) * gamma)[:, None] * features[disturbing]
        order = random.random(patches.shape[:2]).argsort(axis=1)
        patches = np.take_along_axis(patches, order[:, :, None], axis=1)
        cells = patches.reshape(number, self.grid, self.grid, self.patch, self.patch)
        side = self.grid * self.patch
        values = cells.swapaxes(2, 3).reshape(number, side, side)
        largest = max(SIGNAL_RANGE[1], CENTRE_RANGE[1]) * np.abs(rule).max()
        return values / largest, labels, kinds
