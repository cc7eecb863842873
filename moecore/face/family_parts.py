"""Families by name: ``moecore.routers.TopKSoftmax`` is the class of that part of ours."""

from typing import Any

from moecore.core.config import Config, find_by_class_name, list_class_names
from moecore.nn.backbones.base_model import Backbone
from moecore.nn.experts.base import Experts
from moecore.nn.routers.base import Router
from moecore.training.regularizers.base import Regularizer


class FamilyParts:
    """Our parts of a family as attributes, each imported at its first use."""

    def __init__(self, family: type[Config]) -> None:
        self._family = family
        self.__doc__ = family.__doc__

    def __getattr__(self, name: str) -> Any:
        return find_by_class_name(self._family, name)

    def __dir__(self) -> list[str]:
        return list_class_names(self._family)


backbones = FamilyParts(Backbone)
experts = FamilyParts(Experts)
regularizers = FamilyParts(Regularizer)
routers = FamilyParts(Router)
