"""Write the .pyi of each public family: its parts and their settings, for type checkers.

    python -m tools.stubs

A class of a stub inherits from the part and repeats its settings: most checkers see the default of
``Field(2, ge=1)`` only where it is a keyword. The code hash reads its imports, too.
"""

import inspect
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

import moecore
from moecore.core.config import KIND, Config
from moecore.core.source_layout import PUBLIC_FAMILIES

HEAD = '"""Written by `python -m tools.stubs`: the parts of a family and their settings."""\n'
LINE = 100  # characters, as in [tool.ruff]
WRITTEN_OUT = (bool, int, str, NoneType)  # types of defaults that a stub shows


def list_family_modules() -> list[ModuleType]:
    """Return the public modules that offer the parts of a family."""
    return [getattr(moecore, name) for name in PUBLIC_FAMILIES]


def locate_stub(module: ModuleType) -> Path:
    return Path(str(module.__file__)).with_suffix(".pyi")


def render_stub(module: ModuleType) -> str:
    """Return the text of a family's .pyi.

    Raises:
        ValueError: for a type of a setting that is not known here, or two classes of one name.
    """
    offered = [getattr(module, name) for name in dir(module)]
    imports: dict[str, str] = {}  # name in the stub → module:name
    lines: list[str] = []
    for part in offered:
        home = f"{part.__module__}:{part.__name__}"
        if inspect.isabstract(part):
            imports[f"{part.__name__} as {part.__name__}"] = home
            continue
        imports[f"{part.__name__} as _{part.__name__}"] = home
        lines += ["", f"class {part.__name__}(_{part.__name__}):"]
        lines += [f"    {line}".rstrip() for line in _render_body(part, offered, imports)]
    froms = [f"from {home.partition(':')[0]} import {name}" for name, home in imports.items()]
    froms.sort(key=lambda line: ("moecore" in line, line))
    return "\n".join([HEAD, *froms, *lines]) + "\n"


def _render_body(part: type[Config], offered: list[type], imports: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a class: its docstring and settings."""
    yield from f'"""{inspect.getdoc(part)}"""'.splitlines()
    for name, field in part.model_fields.items():
        if name == KIND:
            continue
        default = "" if field.is_required() else f" = {_render_default(field)}"
        yield f"{name}: {_render_type(field.annotation, offered, imports)}{default}"
        if field.description:
            yield from textwrap.wrap(f'"""{field.description}"""', LINE - 4)


def _render_default(field: FieldInfo) -> str:
    value = field.default
    is_number = isinstance(value, float) and math.isfinite(value)
    return repr(value) if is_number or isinstance(value, WRITTEN_OUT) else "..."


def _render_type(hint: Any, offered: list[type], imports: dict[str, str]) -> str:
    """Return a type as text, and add to ``imports`` what it names."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _render_type(arguments[0], offered, imports)
    if hint is NoneType or hint is Ellipsis:
        return "None" if hint is NoneType else "..."
    if origin is Literal:
        imports["Literal"] = "typing:Literal"
        return f"Literal[{', '.join(map(repr, arguments))}]"
    words = [_render_type(argument, offered, imports) for argument in arguments]
    if origin in (Union, UnionType):
        return " | ".join(words)
    base = origin or hint
    name = getattr(base, "__name__", None)
    if name is None:
        raise ValueError(f"found the type {hint!r}; allowed: classes, literals and their unions")
    if base in offered and not inspect.isabstract(base):
        name = f"_{name}"
    elif base.__module__ != "builtins":
        home = f"{base.__module__}:{name}"
        if imports.setdefault(name, home) != home:
            raise ValueError(f"found two classes {name}: {imports[name]} and {home}")
    return f"{name}[{', '.join(words)}]" if words else name


if __name__ == "__main__":
    for family in list_family_modules():
        locate_stub(family).write_text(render_stub(family), encoding="utf-8")
