"""The base class of all settings, their validation, and families of interchangeable parts.

A family is a base class and its folder. ``kind: noisy_top_k`` in params.yaml names class NoisyTopK
in that folder's noisy_top_k.py; ``kind: my_lab.cosine`` names class Cosine of module my_lab.cosine,
whose package the file lists under ``packages``. Only parts that are named are imported.

``moecore check`` calls ``misfits`` of every settings object with its ``Surroundings``: for the file
alone, again when the data are known, and again with the sizes of the model, which is built without
memory.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError, PydanticKnownError, SchemaValidator, core_schema

from moecore.core import source_layout
from moecore.core.files import UserError, read_json
from moecore.core.source_layout import ROOT

KIND = "kind"
UNKNOWN_KIND = "unknown_kind"  # type of a pydantic error


Misfits = Iterator[tuple[tuple, str]]  # keys below the settings, and a message


class Surroundings(NamedTuple):
    """What settings are checked with: method, model, data; None, (), {}, "": absent or unknown."""

    # of a method, or of its text tower
    router: Any = None  # the nearest Router that contains the part, or of the same method
    experts: Any = None  # Experts
    losses: Sequence[Any] = ()  # Regularizers, including those that the method adds
    provided: frozenset[str] = frozenset()  # what regularizers may need
    images: Mapping[str, int] = {}  # phase → images per step, each view counted
    # of a model of that method
    layers: int | None = None  # number of layers with experts
    tokens: int | None = None  # per step, in the layer with the fewest
    special: bool | None = None  # whether there are class tokens
    truth: bool | None = None  # whether the kind of each token is known
    # of the data that the settings work on
    phase: str = ""  # key below ``data``, or "teacher"
    source: Any = None  # Source
    preview: Any = None  # the Card of the data

    @property
    def data(self) -> str:
        """Return the key of the data in params.yaml: ``data.<phase>`` or ``teacher.data``."""
        if self.phase == "teacher":
            return "teacher.data"
        return f"data.{self.phase}"

    @property
    def task(self) -> Any:
        """Return the task class of the data's labels; None without data."""
        return None if self.source is None else self.source.labels_task

    @property
    def is_text(self) -> bool:
        """Return whether the data are text."""
        return self.source is not None and self.task.of_text

    @property
    def has_truth(self) -> bool:
        """Return whether the data state each token's kind: the true group that it belongs to."""
        return self.preview is not None and bool(self.preview.truth)

    def lacks(self, what: str) -> str | None:
        """Return why the labels do not allow ``what`` (see ``Task.needs_classes``), else None."""
        if self.source is None:
            return None
        return self.task.needs_classes(what)


def list_idle_misfits(settings: Any, names: Iterable[str], why: str, allowed: str) -> Misfits:
    # why: the reason that the settings have no effect. allowed: a change that gives them one.
    for name in names:
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            yield (name,), f"found {value}, but {why}; allowed: leave it out, or {allowed}"


def format_nondefaults(value: Any) -> str:
    if hasattr(value, "model_dump"):
        return str(value.model_dump(exclude_defaults=True) or "it")
    return str(value)


class Config(BaseModel):
    """Immutable settings that refuse unknown keys.

    A *part* (router, attack, ...) is a subclass whose ``kind`` literal is the stem of its file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key below these settings, ``found …; allowed: …``) for each conflict.

        ``moecore check`` prepends file, line and key. It also calls this on nested settings.

        Args:
            around: What these settings are combined with.
        """
        yield from ()

    def remarks(self) -> Misfits:
        """Yield (key below these settings, note) for notes that ``moecore check`` prints."""
        yield from ()

    def surround(self, around: Surroundings) -> Surroundings:
        """Return the ``Surroundings`` of the settings that are nested in these.

        Args:
            around: The surroundings of these settings.
        """
        return around


AnySettings = TypeVar("AnySettings", bound=Config)


def replace_and_validate(
    section: str, settings: AnySettings, changes: Mapping[str, Any], family: Any = None
) -> AnySettings:
    """Return ``settings`` with ``changes``, validated; UserError names ``section`` and bad key."""
    # family: of the new part if ``kind`` changes; fields that it lacks are dropped.
    values = settings.model_dump()
    if family is not None and "kind" in changes:
        fields = family.fields_of_kind(str(changes["kind"]))
        values = {name: value for name, value in values.items() if name in fields}
    values |= changes
    try:
        if family is not None and "kind" in changes:
            return family.model_validate(values)
        return settings.__class__.model_validate(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(str(word) for word in first_error["loc"] if word != values.get("kind"))
        message = f"{first_error['msg']} (found {first_error['input']!r})"
        raise UserError(f"{section}.{key}: {message}") from None


def validate_again(settings: AnySettings, key: str) -> AnySettings:
    """Return changed settings, validated by their class; UserError, naming ``key``, if invalid."""
    try:
        return settings.__class__.model_validate(settings.model_dump())
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{key}: {reason}") from None


def read_json_settings(path: Path, kind: type[AnySettings], what: str) -> AnySettings:
    """Read settings ``kind`` from JSON; UserError, naming the expected ``what``, if invalid."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        again = "run the stage that writes it again"
        raise UserError(f"{path}: not {what} of this version ({problem}); {again}") from error


class Part(Config):
    """Base of families (Router, …): a field of that type takes the subclass that ``kind`` names."""

    family: ClassVar[type["Part"] | None] = None  # a direct subclass is its own family

    kind: Any  # a literal: the file's stem, or the dotted name of a module from outside

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.family = cls.family or cls

    @classmethod
    def class_kind(cls) -> str:
        kind = cls.model_fields[KIND].default
        return kind if isinstance(kind, str) else ""

    @classmethod
    def fields_of_kind(cls, kind: str) -> set[str]:
        try:
            return set(find_class(cls, kind).model_fields)
        except (KeyError, ValueError):
            return set()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        if cls.family is not cls:
            return handler(source)
        return core_schema.with_info_plain_validator_function(
            lambda value, info: _validate_part(cls, value, info),
            serialization=core_schema.simple_ser_schema("any"),  # with the fields of the part
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if cls.family is cls:
            schema = _tagged_union(*part_classes_by_kind(cls, imports=True).values())
        return handler(schema)


def is_family_base(cls: type) -> bool:
    return issubclass(cls, Part) and cls.family is cls


def find_class(family: type[AnySettings], name: str) -> type[AnySettings]:
    """Return a family's class of kind ``name``; KeyError if unknown, ValueError if import fails."""
    if source_layout.DOTTED_NAME.fullmatch(name):
        return _find_outside_class(family, name)
    if part := _find_builtin_class(family, name):
        return part
    raise KeyError(name)


def builtin_kinds(family: type[Config]) -> list[str]:
    """Return the sorted kinds of a family's parts in moecore, from its folder's file names."""
    stems = sorted(file.stem for file in _family_folder(family).glob("*.py"))
    return [stem for stem in stems if _find_builtin_class(family, stem)]


def part_classes_by_kind(
    family: type[AnySettings], imports: bool = False
) -> dict[str, type[AnySettings]]:
    """Return kind → class: moecore's parts, then loaded parts of packages (``imports``: all)."""
    # imports: also import parts that are not loaded yet; ValueError if one is invalid.
    named = {name: find_class(family, name) for name in builtin_kinds(family)}
    for name in source_layout.list_allowed_modules(lambda file: bool(_find_class_starts(file))):
        if not imports and name not in sys.modules:
            continue
        part = getattr(source_layout.import_module_of_package(name), _class_name(name))
        if inspect.isclass(part) and issubclass(part, family):
            named[name] = find_class(family, name)
    return named


def collect_constants_named(package: str, name: str) -> list[Any]:
    """Return the values of constant ``name`` in all modules of ``package`` and allowed packages."""

    def defines(file: Path) -> bool:
        return f"\n{name} = " in file.read_text(encoding="utf-8")

    files = filter(defines, sorted((ROOT / package.replace(".", "/")).glob("*.py")))
    modules = [importlib.import_module(f"{package}.{file.stem}") for file in files]
    allowed = source_layout.list_allowed_modules(defines)
    modules += map(source_layout.import_module_of_package, allowed)
    return [getattr(module, name) for module in modules]


def lazy_getattr(package: str, base: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``; they import a part class on first use."""
    # base: ``module:name`` of the family's base class.
    module, _, base_name = base.partition(":")

    def load_family() -> type[Config]:
        return getattr(importlib.import_module(module), base_name)

    def find_by_class_name(name: str) -> type[Config]:
        if name == base_name:
            return load_family()
        if name[:1].isupper():
            for kind in [file.stem for file in _family_folder(load_family()).glob("*.py")]:
                if _class_name(kind) == name and (part := _find_builtin_class(load_family(), kind)):
                    return part
            if name in (inside := _settings_inside_parts(load_family())):
                return inside[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_class_names() -> list[str]:
        parts = map(_class_name, builtin_kinds(load_family()))
        return sorted([base_name, *parts, *_settings_inside_parts(load_family())])

    return find_by_class_name, list_class_names


def settings_classes_in_annotation(annotation: Any) -> Iterator[type[Config]]:
    """Yield the settings classes in a type annotation, such as ``tuple[Adam | Sgd, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from settings_classes_in_annotation(inner)


def _settings_inside_parts(family: type[Config]) -> dict[str, type[Config]]:
    """Return name → class of all settings nested in a family's parts, except parts themselves."""
    inside: dict[str, type[Config]] = {}
    owners = [find_class(family, name) for name in builtin_kinds(family)]
    for owner in owners:  # the list grows in the loop
        for field in owner.model_fields.values():
            for settings in settings_classes_in_annotation(field.annotation):
                if not issubclass(settings, Part) and settings.__name__ not in inside:
                    inside[settings.__name__] = settings
                    owners.append(settings)
    return inside


@cache
def _find_builtin_class(family: type[AnySettings], name: str) -> type[AnySettings] | None:
    file = _family_folder(family) / f"{name}.py"
    if not name.isidentifier() or not file.is_file() or not _find_class_starts(file):
        return None
    package = family.__module__.rpartition(".")[0]
    part = getattr(importlib.import_module(f"{package}.{name}"), _class_name(name))
    if issubclass(part, family) and not inspect.isabstract(part):
        return part
    return None


def _find_outside_class(family: type[AnySettings], name: str) -> type[AnySettings]:
    module = source_layout.import_module_of_package(name)
    word = _class_name(name)
    file = Path(str(module.__file__))
    part = getattr(module, word, None)
    if not inspect.isclass(part):
        raise ValueError(f"found {name}, but {file} has no class {word}")
    if len(lines := _find_class_starts(file)) > 1:
        both = " and ".join(map(str, lines))
        raise ValueError(f"found {name}, but {file} has several classes {word}: lines {both}")
    if not issubclass(part, family):
        raise ValueError(f"found {name}, but {word} of {file} is no {family.__name__}")
    if issubclass(part, Part) and (kind := part.class_kind()) != name:
        allowed = f'kind: Literal["{name}"] = "{name}"'
        raise ValueError(f"found {name}, whose class has the kind {kind!r}; allowed: {allowed}")
    constants = {word for word in family.__class_vars__ if not hasattr(part, word)}
    if lacking := ", ".join(sorted({*part.__abstractmethods__, *constants})):
        raise ValueError(f"found {name}, which lacks what every {family.__name__} has: {lacking}")
    return part


def check_instance_of_family(key: str, value: Any, family: type[Part], example: str) -> None:
    """Raise UserError, with an ``example`` in its text, unless ``value`` is of ``family``."""
    if not isinstance(value, family):
        text = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise UserError.at(key, found=text, allowed=f"settings, such as {example}")


def _validate_part(family: type[Part], value: Any, info: pydantic.ValidationInfo) -> Part:
    """Return the part that a value describes; errors have the form of a pydantic union's."""
    if isinstance(value, family):
        return value
    if isinstance(value, type | Config):  # written in Python, not read from a file
        example = f"an object of a subclass of {family.__name__}"
        check_instance_of_family(str(info.field_name), value, family, example)
    if not isinstance(value, dict):
        raise PydanticKnownError("dict_type")
    if KIND not in value:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": f"'{KIND}'"})
    try:
        part = find_class(family, str(value[KIND]))
    except KeyError:
        context = {"tag": str(value[KIND]), "kinds": ", ".join(builtin_kinds(family))}
        text = "found kind: {tag}; allowed: {kinds}, or package.module of a listed package"
        raise PydanticCustomError(UNKNOWN_KIND, text, context) from None
    if info.mode == "json":  # strict, except that a list may fill a tuple
        return _build_part_class_validator(part).validate_json(json.dumps(value), strict=True)
    return _build_part_class_validator(part).validate_python(value)


@cache
def _build_part_class_validator(part: type[Part]) -> SchemaValidator:
    """Return a validator of one part whose errors have the kind in their location."""
    return SchemaValidator(_tagged_union(part))


def _tagged_union(*parts: type[Part]) -> core_schema.CoreSchema:
    choices = {part.class_kind(): part.__pydantic_core_schema__ for part in parts}
    return core_schema.tagged_union_schema(choices, KIND)


def _family_folder(family: type[Config]) -> Path:
    return (ROOT / family.__module__.replace(".", "/")).parent


def _class_name(name: str) -> str:
    """Return the class name of a kind: NoisyTopK for ``my_lab.noisy_top_k``."""
    return "".join(word.capitalize() for word in name.rpartition(".")[2].split("_"))


def _find_class_starts(file: Path) -> list[int]:
    defining = re.compile(rf"class {_class_name(file.stem)}\b")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if defining.match(line)]
