"""What every regularizer says of itself."""

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from moecore.core.config import Part
from moecore.core.routing_records import ObjectiveInputs


class Regularizer(Part, ABC):
    """A loss beside the task's, a family of parts: its settings, which are called with a step."""

    # "routing", "load" and "basis" of routers and experts, "guidance" of a teacher, "two_views",
    # "truth" of the data
    needs: ClassVar[frozenset[str]] = frozenset({"routing"})

    # evens out the use of experts, as a router's balance does
    balances_load: ClassVar[bool] = False

    weight: float = Field(1.0, ge=0, description="factor in the objective")

    @abstractmethod
    def __call__(self, step: ObjectiveInputs) -> Tensor:
        """Return the term without its weight, a scalar, fp32."""
