"""What every router's settings say of it."""

from typing import ClassVar, Self

from moecore.config import Config
from moecore.files import StageError


class RouterConfig(Config):
    """``build(width, experts, basis)`` gives a module; ``module(tokens, context)`` returns (plan, RoutingRecord).

    tokens: (B, T, d).  context: RoutingContext.  A plan has ``dispatch(tokens) -> Rows`` and ``combine(rows) -> tokens``.
    """

    provides: ClassVar[frozenset[str]] = frozenset()  # what regularizers may need of its record beyond probs: "load"
    wants: ClassVar[frozenset[str]] = frozenset()  # fields of RoutingContext that it reads

    def with_k(self, k: int) -> Self:
        """The same router with another number of experts per token. Raises StageError for a router without such a number."""
        if "k" not in type(self).model_fields:
            raise StageError(f"finetune.k: found {k}, but the router {self.kind} has no k; allowed: null")
        return self.model_copy(update={"k": k})

    def check_k(self, experts: int, key: str = "router.k") -> None:
        """Raise StageError where a token would use more experts than there are."""
        if self.k > experts:
            raise StageError(f"{key} is {self.k}, but there are {experts} experts (experts.number); k may be at most {experts}")

    def finetuned(self) -> Self:
        """The router as it goes on when its model is fine-tuned."""
        return self

    def active(self, experts: int) -> float:
        """How many of ``experts`` experts a token uses, on average."""
        return self.k
