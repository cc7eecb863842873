"""Families of parts: each is a base class, a child of ``Part``, and the folder around its file.

``kind: noisy_top_k`` in params.yaml is the class NoisyTopK of the file noisy_top_k.py in that
folder; ``kind: my_lab.cosine`` is the class Cosine of the module my_lab.cosine, of a package that
the file lists under ``packages``. A part is imported when it is named; nothing else is, by name.
"""

import importlib
import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import (
    CoreSchema,
    PydanticCustomError,
    PydanticKnownError,
    SchemaValidator,
    core_schema,
)

from moecore.core.config import Config
from moecore.core.outside_packages import DOTTED_NAME, import_module_of_package, list_modules
from moecore.core.source_layout import ROOT

AnyPart = TypeVar("AnyPart", bound="Part")
KIND = "kind"
UNKNOWN_KIND = "unknown_kind"  # pydantic's type of an error


class Part(Config):
    """Settings that a ``kind`` names; in a field of a family's type it says which part it is."""

    family: ClassVar[type["Part"] | None] = None  # of a child of this class it is the child itself

    kind: Any  # a literal: the file's stem, or the dotted name of a module from outside

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.family = cls.family or cls

    @classmethod
    def class_kind(cls) -> str:
        """Return the kind that stands for this class; "" where it has none."""
        kind = cls.model_fields[KIND].default
        return kind if isinstance(kind, str) else ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.family is not cls:
            return handler(source)
        return core_schema.with_info_plain_validator_function(
            lambda value, info: _validate_part(cls, value, info),
            serialization=core_schema.simple_ser_schema("any"),  # with the fields of the part
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if cls.family is cls:
            schema = _tagged_union(*list_part_classes(cls))
        return handler(schema)


def is_family(cls: type) -> bool:
    """Return whether a field of this type may be any part of a family."""
    return issubclass(cls, Part) and cls.family is cls


def find_part_class(family: type[AnyPart], kind: str) -> type[AnyPart]:
    """Return the part of a family that ``kind`` names.

    Raises ValueError, a line, where it is no part from outside, and KeyError for another word.
    """
    if DOTTED_NAME.fullmatch(kind):
        return _outside_part_class(family, kind)
    if part := _own_part_class(family, kind):
        return part
    raise KeyError(kind)


def list_own_kinds(family: type[Part]) -> list[str]:
    """Return the kinds of our parts, by the files in the family's folder."""
    stems = sorted(file.stem for file in _folder(family).glob("*.py"))
    return [stem for stem in stems if _own_part_class(family, stem)]


def list_part_classes(family: type[AnyPart]) -> list[type[AnyPart]]:
    """Return our parts of a family, and those of the packages that are allowed."""
    own = [find_part_class(family, kind) for kind in list_own_kinds(family)]
    others = []
    for name in list_modules(lambda file: bool(_class_lines(file))):
        named = getattr(import_module_of_package(name), _class_name(name))
        if inspect.isclass(named) and issubclass(named, family):
            others.append(find_part_class(family, name))
    return [*own, *others]


@cache
def _own_part_class(family: type[AnyPart], kind: str) -> type[AnyPart] | None:
    file = _folder(family) / f"{kind}.py"
    if not kind.isidentifier() or not file.is_file() or not _class_lines(file):
        return None
    package = family.__module__.rpartition(".")[0]
    part = getattr(importlib.import_module(f"{package}.{kind}"), _class_name(kind))
    return part if issubclass(part, family) and part.class_kind() == kind else None


def _outside_part_class(family: type[AnyPart], kind: str) -> type[AnyPart]:
    module = import_module_of_package(kind)
    name, file = _class_name(kind), Path(str(module.__file__))
    part = getattr(module, name, None)
    if not inspect.isclass(part):
        raise ValueError(f"found {kind}, but {file} has no class {name}")
    if len(lines := _class_lines(file)) > 1:
        both = " and ".join(map(str, lines))
        raise ValueError(f"found {kind}, but {file} has several classes {name}: lines {both}")
    if not issubclass(part, family):
        raise ValueError(f"found {kind}, but {name} of {file} is no {family.__name__}")
    if (own := part.class_kind()) != kind:
        allowed = f'kind: Literal["{kind}"] = "{kind}"'
        raise ValueError(
            f"found {kind}, whose class has the kind {own!r}; allowed: {allowed} ({file})"
        )
    if lacking := ", ".join(sorted(part.__abstractmethods__)):
        raise ValueError(f"found {kind}, which lacks what every {family.__name__} has: {lacking}")
    return part


def _validate_part(family: type[Part], value: Any, info: ValidationInfo) -> Part:
    """Return the part that a value describes, validated by its own class, as pydantic's unions."""
    if isinstance(value, family):
        return value
    if not isinstance(value, dict):
        raise PydanticKnownError("dict_type")
    if KIND not in value:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": f"'{KIND}'"})
    try:
        part = find_part_class(family, str(value[KIND]))
    except KeyError:
        context = {"tag": str(value[KIND]), "kinds": ", ".join(list_own_kinds(family))}
        text = "found kind: {tag}; allowed: {kinds}, or package.module of a listed package"
        raise PydanticCustomError(UNKNOWN_KIND, text, context) from None
    if info.mode == "json":  # a list may fill a tuple there, and strictly nothing else changes
        return _part_validator(part).validate_json(json.dumps(value), strict=True)
    return _part_validator(part).validate_python(value)


@cache
def _part_validator(part: type[Part]) -> SchemaValidator:
    """Return a validator of one part, which names its kind in the place of an error."""
    return SchemaValidator(_tagged_union(part))


def _tagged_union(*parts: type[Part]) -> CoreSchema:
    choices = {part.class_kind(): part.__pydantic_core_schema__ for part in parts}
    return core_schema.tagged_union_schema(choices, KIND)


def _folder(family: type[Part]) -> Path:
    return (ROOT / family.__module__.replace(".", "/")).parent


def _class_name(kind: str) -> str:
    """``my_lab.noisy_top_k`` → NoisyTopK."""
    return "".join(word.capitalize() for word in kind.rpartition(".")[2].split("_"))


def _class_lines(file: Path) -> list[int]:
    """Return the lines at which a file defines the class that is called as the file."""
    defining = re.compile(rf"class {_class_name(file.stem)}\b")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if defining.match(line)]
