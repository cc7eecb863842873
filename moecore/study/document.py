"""YAML by the rules of YAML 1.2, as DVC reads it, with the place of every key.

``1e-4`` is a number, ``no``, ``on`` and ``yes`` are text, ``010`` is 10, and a key that is written
twice in one mapping is an error.
"""

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.cyaml import CParser
from ruamel.yaml.error import MarkedYAMLError, StringMark, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, ScalarEvent
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.resolver import Resolver

from moecore.core.files import UserError
from moecore.study.mistakes import LONG, cut, faults_of, plain, values_of

TAG = "tag:yaml.org,2002:"
CORE = ("null", "bool", "int", "float", "str", "seq", "map")  # YAML 1.2's core schema
TEXT = ("timestamp", "value")  # ruamel's dates, and YAML 1.1's "=": text in the core schema
DEEP = 64  # levels of a file
LARGE = 10**7  # bytes of a file: ours have 30 thousand
MANY = 100_000  # values of a file, those that aliases repeat among them
NOT_OF = {"int": "an integer", "float": "a number", "bool": "true or false"}


class _Loader(CParser, SafeConstructor, Resolver):
    """libyaml's parser with the core schema and merge keys; every other tag is refused."""

    yaml_constructors: dict = {
        tag: make
        for tag, make in SafeConstructor.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in CORE
    }
    yaml_constructors |= {TAG + name: SafeConstructor.construct_yaml_str for name in TEXT}

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        self._parser = self._composer = self
        SafeConstructor.__init__(self, loader=self)
        Resolver.__init__(self, loadumper=self)

    @property
    def processing_version(self) -> tuple[int, int]:
        return 1, 2

    def construct_non_recursive_object(self, node: Any, tag: str | None = None) -> Any:
        """As ruamel.yaml does; `!!int x`, which it answers with a bug, is an error with a place."""
        try:
            return super().construct_non_recursive_object(node, tag)
        except (ValueError, KeyError, IndexError):
            wanted = NOT_OF.get(str(node.tag).removeprefix(TAG), "of its type")
            shown = str(node.value)[:40]
            problem = f"{shown!r} is not {wanted}"
            raise ConstructorError(None, None, problem, node.start_mark) from None


@dataclass(frozen=True)
class Document:
    """One parsed YAML file: its data, and where each key stands."""

    path: str
    data: Any
    node: Node | None
    start: StringMark | None = None  # of a document that is a part of its file

    def place(self, keys: Sequence[str | int]) -> str:
        """``path:line:column`` of the deepest key along ``keys`` that exists (1:1: none does)."""
        node = self.node
        mark = self.start
        for key in keys:
            step = _child(node, key)
            if step is None:
                break
            mark, node = step
        return _place(self.path, mark)

    def below(self, key: str | int) -> "Document":
        """What stands at a key that the file has, as a document of its own."""
        step = _child(self.node, key)
        assert step is not None, f"{self.path} has no key {key}"
        mark, node = step
        return Document(self.path, self.data[key], node, mark)

    def get(self, keys: Sequence[str]) -> Any:
        """The value at ``keys``.

        Raises UserError for the first key that is missing; it names a close one and all there are.
        """
        value = self.data
        for depth, key in enumerate(keys):
            there = list(value) if isinstance(value, dict) else []
            if key not in there:
                raise UserError(self._missing(keys, depth, there))
            value = value[key]
        return value

    def _missing(self, keys: Sequence[str], depth: int, there: list) -> str:
        """What to say where ``keys[depth]`` is not among the keys that are there."""
        place = self.place(keys[:depth])
        holder = ".".join(keys[:depth]) or "the file"
        known = ", ".join(map(str, there)) or "no keys"
        hint = near(keys[depth], there)
        return plain(f"{place}: {'.'.join(keys)}: missing{hint}; {holder} has: {known}")


def near(word: Any, known: Sequence[Any]) -> str:
    """``, did you mean 'x'?`` where a known word is close, else nothing."""
    if len(str(word)) > LONG:
        return ""  # nothing that is known is so long, and looking for it takes seconds
    close = get_close_matches(str(word), [str(name) for name in known], 1)
    return f", did you mean {close[0]!r}?" if close else ""


def parse(text: str, path: str = "params.yaml") -> Document:
    """Read one YAML 1.2 document.

    Raises UserError for a syntax error or a key that is written twice: file, line and column.
    """
    try:
        _refuse_size(text, path)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(path, None, None)
        if values_of(node) > MANY:
            found = "aliases repeat values until they are more than"
            raise UserError(f"{_place(path, node.start_mark)}: {found} {MANY:,}; allowed: fewer")
        if faults := set(faults_of(node)):
            raise UserError(cut(_in_order(faults, path)))
        return Document(path, loader.construct_document(node), node)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _place(path, mark) if mark else path
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def load(path: str) -> Document:
    """Read the YAML file at ``path``.

    Raises UserError for a file that is missing or not UTF-8, and like ``parse``.
    """
    try:
        if stat.S_ISFIFO(mode := Path(path).stat().st_mode) or stat.S_ISCHR(mode):
            raise UserError(f"{path}: found a pipe or a device, which may not end; allowed: a file")
        with open(path, "rb") as handle:
            content = handle.read(LARGE + 1)
        if len(content) > LARGE:
            raise UserError(f"{path}: found more than {LARGE:,} bytes; allowed: fewer")
        return parse(content.decode("utf-8"), str(path))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "start from the folder that holds it"
        raise UserError(f"{path}: cannot be read ({reason}); {hint}") from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start].split(b"\n")
        place = f"{path}:{len(before)}:{len(before[-1]) + 1}"
        raise UserError(f"{place}: not UTF-8 text (byte {error.start})") from None


def _refuse_size(text: str, path: str) -> None:
    """Raise UserError where values lie deeper than DEEP, before anything descends to them, and
    where there are more than MANY.
    """
    events = _Loader(text)
    depth = 0
    values = 0
    while events.check_event():
        event = events.get_event()
        if isinstance(event, CollectionStartEvent):
            depth += 1
            values += 1
        elif isinstance(event, CollectionEndEvent):
            depth -= 1
        elif isinstance(event, ScalarEvent):
            values += 1
        if depth > DEEP:
            where = _place(path, event.start_mark)
            raise UserError(f"{where}: nested more than {DEEP} levels deep; allowed: fewer")
        if values > 2 * MANY:  # a key and a value each
            where = _place(path, event.start_mark)
            raise UserError(f"{where}: found more than {MANY:,} values; allowed: fewer")


def _place(path: str, mark: StringMark | None) -> str:
    if mark is None:
        return f"{path}:1:1"
    return f"{path}:{mark.line + 1}:{mark.column + 1}"


def _in_order(faults: set[tuple[StringMark, str]], path: str) -> list[str]:
    """The faults as lines, in the order of the file."""
    lines = {(mark.line, mark.column): f"{_place(path, mark)}: {text}" for mark, text in faults}
    return [lines[place] for place in sorted(lines)]


def _child(node: Node | None, key: str | int) -> tuple[StringMark, Node] | None:
    if isinstance(node, MappingNode):
        return _entries(node).get(str(key))
    if isinstance(node, SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


@lru_cache(maxsize=64)
def _entries(node: MappingNode) -> dict[str, tuple[StringMark, Node]]:
    """Key → place and value; of thousands of keys each would else be sought among all."""
    # Merged keys come first, and the file's own key wins.
    return {name.value: (name.start_mark, value) for name, value in node.value}
