"""Points near random subspaces, whose label is a direction inside theirs.

D subspaces of rank r in d = S² dimensions, n images.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.drawn_images import DrawnImages, DrawnSource

WIDEST = 4.0  # standard deviations of a pixel that just fit


class Subspaces(DrawnSource):
    """Each image is B_k z and noise: B_k one of D random orthonormal bases, z of r normal numbers.

    The label is the largest of z, the truth k. An image and its negative are as likely, and a
    linear router never sends both to one expert.
    """

    paper: ClassVar[str] = "drawn; ours, for the bases of ERMoE"

    kind: Literal["subspaces"] = "subspaces"
    subspaces: int = Field(16, ge=1, le=255, description="Number of subspaces D")
    rank: int = Field(4, ge=2, le=100, description="Dimensions of each r, and number of classes")
    size: int = Field(6, ge=2, le=64, description="Side of an image S, pixels")
    noise: float = Field(0.1, ge=0, le=10, description="Noise's length, over the expected signal's")

    @property
    def title(self) -> str:
        """Return what the data is, in words."""
        return f"{self.subspaces} subspaces of rank {self.rank}"

    @property
    def side(self) -> int:
        """Pixels along each side of an image."""
        return self.size

    @property
    def kinds(self) -> int:
        """Number of kinds: the subspaces."""
        return self.subspaces

    @property
    def classes(self) -> tuple[str, ...]:
        """The directions of a basis."""
        return tuple(map(str, range(self.rank)))

    def draw_rule(self, random: np.random.Generator) -> np.ndarray:
        """Return the bases (D, d, r); UserError where an image has fewer pixels than r."""
        dimension = self.size**2
        if self.rank > dimension:
            allowed = f"at most {dimension}, the pixels of an image"
            raise UserError(f"rank: found {self.rank}; allowed: {allowed}")
        return np.linalg.qr(random.standard_normal((self.subspaces, dimension, self.rank)))[0]

    def draw_images(
        self, rule: np.ndarray, number: int, random: np.random.Generator
    ) -> DrawnImages:
        """Return images in which four standard deviations of a pixel just fit."""
        kinds = random.integers(self.subspaces, size=number)
        inside = random.standard_normal((number, self.rank))
        deviation = (self.rank / self.size**2) ** 0.5  # of a pixel, over subspaces
        noise = random.normal(0, self.noise * deviation, (number, self.size**2))
        points = np.einsum("ndr,nr->nd", rule[kinds], inside) + noise
        widest = WIDEST * deviation * (1 + self.noise**2) ** 0.5
        values = (points / widest).reshape(number, self.size, self.size)
        return DrawnImages(values, inside.argmax(axis=1), kinds)
