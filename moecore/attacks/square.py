"""The Square attack by the package pyautoattack: random search that needs no gradient.

Source: Andriushchenko et al. (2020).
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pyautoattack.square import SquareAttack
from pydantic import Field
from torch import Tensor

from moecore.attacks.reference import ReferenceAttack
from moecore.core.streams import seed_of


class Square(ReferenceAttack):
    """Squares of pixels go to the edge of the ball where that lowers the margin.

    An image is left alone once it is misclassified. The start (vertical stripes) is drawn image by
    image; the squares are common to all images, drawn by ``seed``.
    """

    kind: Literal["square"] = "square"
    queries: int = Field(5000, ge=1, description="Squares tried per image.")
    seed: int = Field(
        0, ge=0, description="Draws the squares, the same for all images of all batches."
    )

    def perturbed(
        self,
        logits: Callable[[Tensor], Tensor],
        centre: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: Sequence[torch.Generator] | None,
    ) -> Tensor:
        """The image of the smallest margin. Raises ValueError without a generator."""
        if generator is None:
            raise ValueError("attack: square draws a random start; pass a CPU generator")
        # As in AutoAttack: the squares shrink with the queries made, whatever the budget.
        attack = _Drawn(
            logits,
            n_queries=self.queries,
            eps=epsilon,
            p_init=0.8,
            resc_schedule=False,
            device=centre.device,
        )
        attack.starts = generator
        attack.squares = torch.Generator().manual_seed(seed_of("attack_squares", self.seed))
        attack.init_hyperparam(centre)
        return attack.attack_single_run(centre, labels)[1]


class _Drawn(SquareAttack):
    """The package's attack with our generators in place of the global one.

    They draw the signs of one image's stripes, and the common squares.
    """

    starts: Sequence[torch.Generator]
    squares: torch.Generator

    def random_choice(self, shape: Sequence[int]) -> Tensor:
        """-1 or 1; a shape (B, C, 1, W) is that of the start."""
        if len(shape) == 4:
            stripes = [torch.rand(list(shape[1:]), generator=each) for each in self.starts]
            drawn = torch.stack(stripes)
        else:
            drawn = torch.rand(shape, generator=self.squares)
        return torch.sign(2 * drawn - 1).to(self.device)

    def random_int(self, low: int = 0, high: int = 1, shape: Sequence[int] = (1,)) -> Tensor:
        """Corners of a square."""
        drawn = torch.rand(shape, generator=self.squares)
        return (low + (high - low) * drawn).long().to(self.device)
