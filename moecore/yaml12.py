"""Floor 0: YAML by the rules of YAML 1.2, as DVC reads it, with the place of every key.

PyYAML follows YAML 1.1, where ``1e-4`` is text, ``no`` is false and ``010`` is 8. Here ``1e-4`` is a number, ``no``, ``on``
and ``yes`` are text, ``010`` is 10, and a key that is written twice in one mapping is an error.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from moecore.files import StageError

TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2 and merge keys; every other tag (dates, sets, Python objects) is refused."""

    yaml_implicit_resolvers: dict = {}
    yaml_constructors = {
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in ("null", "bool", "str", "seq", "map")
    }  # fmt: skip


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = node.value
    if not re.fullmatch(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", text):
        raise yaml.constructor.ConstructorError(None, None, f"{text!r} is not an integer", node.start_mark)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    try:
        return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", node.value.lower()))
    except ValueError:
        raise yaml.constructor.ConstructorError(None, None, f"{node.value!r} is not a number", node.start_mark) from None


_Loader.add_constructor(TAG + "int", _integer)
_Loader.add_constructor(TAG + "float", _number)
for _tag, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Document:
    """One parsed YAML file: its data, and where each key stands."""

    path: str
    data: Any
    node: yaml.Node | None

    def place(self, keys: Sequence[str | int]) -> str:
        """``path:line:column`` of the deepest key along ``keys`` that exists (1:1 where none does)."""
        mark = None
        node = self.node
        for key in keys:
            step = _child(node, key)
            if step is None:
                break
            mark, node = step
        return f"{self.path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{self.path}:1:1"

    def get(self, keys: Sequence[str]) -> Any:
        """The value at ``keys``; a StageError names the first key that is missing, a close one, and those that exist."""
        value = self.data
        for depth, key in enumerate(keys):
            there = list(value) if isinstance(value, dict) else []
            if key not in there:
                known = f"{'.'.join(keys[:depth]) or 'the file'} has: {', '.join(map(str, there)) or 'no keys'}"
                raise StageError(f"{self.place(keys[:depth])}: {'.'.join(keys)}: missing{near(key, there)}; {known}")
            value = value[key]
        return value


def near(word: Any, known: Sequence[Any]) -> str:
    """``, did you mean 'x'?`` where a known word is close, else nothing."""
    from difflib import get_close_matches  # only when something is wrong

    close = get_close_matches(str(word), [str(name) for name in known], 1)
    return f", did you mean {close[0]!r}?" if close else ""


def parse(text: str, path: str = "params.yaml") -> Document:
    """Read one YAML 1.2 document; a syntax error or a duplicate key is a StageError with file, line and column."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = list(dict.fromkeys(_faults(node, path, ()))) if node else []
        if problems:
            raise StageError("\n".join(problems))
        return Document(path, loader.construct_document(node) if node else None, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise StageError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise StageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader:
            loader.dispose()


def load(path: str) -> Document:
    """Read the YAML file at ``path``; a missing file or one that is not UTF-8 is a StageError that names it."""
    try:
        with open(path, encoding="utf-8") as handle:
            return parse(handle.read(), str(path))
    except OSError as error:
        raise StageError(f"{path}: cannot be read ({error.strerror.lower()}); start from the folder that holds it") from None
    except UnicodeDecodeError as error:
        raise StageError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _faults(node: yaml.Node, path: str, above: tuple[int, ...]) -> Iterator[str]:
    """Every duplicate key below ``node``, and every alias that contains itself."""
    if id(node) in above:
        yield f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}: this value contains itself through an alias"
        return
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[Hashable, yaml.Mark] = {}
        for key, value in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            here = key.start_mark
            if name in first:
                yield f"{path}:{here.line + 1}:{here.column + 1}: key {key.value!r} is written twice, first on line {first[name].line + 1}; keep one"
            first.setdefault(name, here)
            yield from _faults(value, path, above)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _faults(value, path, above)


def _child(node: yaml.Node | None, key: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        found = [(name.start_mark, value) for name, value in node.value if name.value == str(key)]
        return found[-1] if found else None  # merged keys come first, and the file's own key wins
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None
