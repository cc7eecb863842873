"""docs/api.md from signatures and docstrings: ``python -m tests.house.api_page > docs/api.md``."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import moecore
from moecore.core.config import Config
from moecore.face.families import FamilyParts

HEADER = """\
# The public names

`import moecore` offers these names and loads none of them before it is used; everything else may
change without notice. Settings of parts (routers, experts, …) are keyword arguments, and
[methods.md](methods.md) has their equations. This page is written from signatures and docstrings:
`python -m tests.house.api_page > docs/api.md`.
"""


def write_page() -> str:
    """Return the text of docs/api.md."""
    lines = [HEADER]
    for name in moecore.__all__:
        value = getattr(moecore, name)
        lines.append(f"## `moecore.{name}`\n")
        lines += describe_value(name, value)
        for member, part in public_members(value).items():
            lines.append(f"### `moecore.{name}.{member}`\n")
            lines += describe_value(member, part)
    return "\n".join(lines)


def public_members(value: Any) -> dict[str, Any]:
    """Return what a public module or family offers, by name: parts, checks, base classes."""
    if not isinstance(value, (ModuleType, FamilyParts)):
        return {}
    members = {
        name: one
        for name, one in inspect.getmembers(value)
        if not name.startswith("_") and not isinstance(one, ModuleType)
    }
    if value in (moecore.lens, moecore.parts, moecore.pages):
        return members
    is_offered = inspect.isfunction if value is moecore.testing else is_part
    return {name: one for name, one in members.items() if is_offered(one)}


def is_part(value: Any) -> bool:
    """Return whether this is the settings class of a part or of a measurement."""
    return inspect.isclass(value) and issubclass(value, Config)


def describe_value(name: str, value: Any) -> Iterator[str]:
    """Yield the signature of a public name and its docstring."""
    if isinstance(value, str):
        yield "The installed version.\n"
        return
    if text := signature_text(value):
        yield f"```python\n{name}{text}\n```\n"
    yield f"{inspect.getdoc(value)}\n"
    for name in sorted(getattr(value, "__abstractmethods__", ())):
        method = getattr(value, name)
        arguments = "" if isinstance(method, property) else signature_text(method)
        yield f"Yours has `{name}{arguments}`: {inspect.getdoc(method)}\n"


def signature_text(value: Any) -> str:
    """Return what stands behind the name in a call, as it is written; "" of what is not called."""
    if isinstance(value, (ModuleType, FamilyParts)) or value is moecore.UserError:
        return ""
    if is_part(value):
        fields = value.model_fields.items()
        return f"({', '.join(settings_field(*field) for field in fields if field[0] != 'kind')})"
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    assert isinstance(node, ast.ClassDef)
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return f"({ast.unparse(inner.args).removeprefix('self, ')})"
    fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    return f"({', '.join(fields)})"


def settings_field(name: str, field: Any) -> str:
    """Return a field of settings as an argument with its default."""
    if field.is_required():
        return name
    return f"{name}={field.get_default(call_default_factory=True)!r}"


if __name__ == "__main__":
    print(write_page(), end="")
