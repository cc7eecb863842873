"""YAML by the rules of YAML 1.2, as DVC reads it, with the place of every key.

``1e-4`` is a number, ``no``, ``on`` and ``yes`` are text, ``010`` is 10, and a key that is written
twice in one mapping is an error.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.scalarbool import ScalarBoolean

from moecore.core.files import UserError
from moecore.core.source_layout import question_folders
from moecore.study.document import (
    SHOWN_LETTERS,
    did_you_mean,
    shorten_to_one_line,
)

Mark = tuple[int, int]  # line and column, from 0

LEVELS = 64  # of a file
DEEP = f"nested more than {LEVELS} levels deep; allowed: fewer"
BYTES = 300_000  # of a file: ours have 30 thousand
VALUES = 100_000  # of a file, those that aliases repeat among them
OTHER_VERSION = re.compile(r"(?:\A\ufeff?|(?<=[\n\r]))%YAML\s(?!\s*1\.2(\s|\Z))[^\n\r]*")
# ruamel raises Python's own of a tag that does not fit its value, such as `!!int x`, and of
# comments on both sides of a value
PYTHON_ERRORS = (ValueError, LookupError, TypeError, AttributeError, NotImplementedError)
READER_ERRORS = (YAMLError, *PYTHON_ERRORS)
LETTERS = 255  # of a word: no file has a longer name


@dataclass(frozen=True)
class Document:
    """One parsed YAML file: its data, and where each key stands."""

    path: str
    data: Any
    node: Any = None  # ruamel's mapping, list or value, which knows the places
    start: Mark = (0, 0)  # of a document that is a part of its file

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folder of its file, and that of the question that runs there."""
        folder = Path(self.path).parent
        return (folder, *question_folders(folder))

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages that a params.yaml lists, as far as they are words."""
        listed = self.data.get("packages") if isinstance(self.data, dict) else None
        names = listed if isinstance(listed, list) else ()
        return tuple(name for name in names if isinstance(name, str))

    def place(self, keys: Sequence[str | int]) -> str:
        """``path:line:column`` of the deepest key along ``keys`` that exists (1:1: none does)."""
        node = self.node
        mark = self.start
        for key in keys:
            if not _has_child(node, key):
                break
            mark, node = _child(node, key, mark)
        return _place(self.path, mark)

    def below(self, key: str | int) -> "Document":
        """Return what stands at a key that the file has, as a document of its own."""
        mark, node = _child(self.node, key, self.start)
        return Document(self.path, self.data[key], node, mark)

    def get(self, keys: Sequence[str]) -> Any:
        """Return the value at ``keys``.

        Raises UserError for the first key that is missing; it names a close one and all there are.
        """
        value = self.data
        for depth, key in enumerate(keys):
            there = list(value) if isinstance(value, dict) else []
            if key not in there:
                holder = ".".join(keys[:depth]) or "the file"
                known = ", ".join(there) or "no keys"
                missing = f"{'.'.join(keys)}: missing{did_you_mean(key, there)}"
                place = self.place(keys[:depth])
                raise UserError(shorten_to_one_line(f"{place}: {missing}; {holder} has: {known}"))
            value = value[key]
        return value


def load_yaml_document(path: str | Path) -> Document:
    """Read the YAML file at ``path``.

    Raises UserError for a file that is missing, too large or not UTF-8, and as
    ``parse_yaml_document`` does.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "start from the folder that holds it, or begin a project: `moecore new my_study`"
        raise UserError(f"{path}: cannot be read ({reason}); {hint}") from None
    if len(content) > BYTES:
        raise UserError(f"{path}: found {len(content):,} bytes; allowed: up to {BYTES:,}")
    try:
        return parse_yaml_document(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        before = content[: error.start].split(b"\n")
        mark = (len(before) - 1, len(before[-1]))
        raise UserError(f"{_place(path, mark)}: not UTF-8 text (byte {error.start})") from None


def parse_yaml_document(text: str, path: str = "params.yaml") -> Document:
    """Read one YAML 1.2 document.

    Raises UserError for a syntax error, a key or an anchor that is written twice, and for another
    version of YAML: file, line and column.
    """
    if other := OTHER_VERSION.search(text):
        where = _place(path, (text.count("\n", 0, other.start()), 0))
        directive = shorten_to_one_line(other[0].strip("\ufeff "), SHOWN_LETTERS)
        allowed = "YAML 1.2, as DVC reads every file; remove this line"
        raise UserError(f"{where}: found {directive}; allowed: {allowed}")
    try:
        node = _load_nodes(text)
        return Document(path, _PlainData(path).convert(node, (0, 0), 0), node)
    except _UnfitNode as error:
        raise UserError(shorten_to_one_line(f"{_place(path, error.mark)}: {error}")) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _place(path, (mark.line, mark.column)) if mark else path
        reason = f"not valid YAML: {error.problem or error.context}"
        raise UserError(shorten_to_one_line(f"{where}: {reason}")) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; allowed: {LEVELS} levels") from None
    except READER_ERRORS as error:
        reason = f"not valid YAML: {type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(shorten_to_one_line(f"{path}: {reason}")) from None


@lru_cache(maxsize=16)  # one command reads the same few files again and again; nobody edits nodes
def _load_nodes(text: str) -> Any:
    reader = YAML(typ="rt")
    reader.Composer = _Composer
    return reader.load(text)


class _UnfitNode(Exception):
    """What a file of settings may not have, though it is YAML; ``mark``: where."""

    def __init__(self, mark: Any, text: str) -> None:
        super().__init__(text)
        self.mark = (mark.line, mark.column)


class _Composer(Composer):
    """Refuses, as a file is read, what DVC reads otherwise or not at all, and endless brackets."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return a node. Raises _UnfitNode."""
        event = self.parser.peek_event()
        if self.level > LEVELS:
            raise _UnfitNode(event.start_mark, DEEP)
        if getattr(event, "tag", None) == "!":  # None here, a text to DVC where nothing follows
            raise _UnfitNode(event.start_mark, "found the tag !; allowed: values without one")
        if not isinstance(event, AliasEvent) and event.anchor in self.anchors:
            first = self.anchors[event.anchor].start_mark.line + 1
            allowed = f"another name than in line {first}: DVC reads no anchor twice"
            raise _UnfitNode(
                event.start_mark, f"found the anchor &{event.anchor}; allowed: {allowed}"
            )
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


class _PlainData:
    """Dicts, lists and values of Python in the place of ruamel's, which hold places and comments.

    Aliases are followed, so one budget of values and levels also ends those that repeat each other.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.left = VALUES
        self.names: dict[int, list] = {}  # of a mapping by its id, as aliases repeat it

    def convert(self, node: Any, mark: Mark, level: int) -> Any:
        """Return a node's data; raises UserError for what no setting can be."""
        self.left -= 1
        if self.left < 0:
            raise self._refuse(mark, f"found more than {VALUES:,} values; allowed: fewer")
        if level > LEVELS:
            raise self._refuse(mark, DEEP)
        if getattr(getattr(node, "tag", None), "value", None):
            raise self._refuse(mark, f"found the tag {node.tag.value}; allowed: values without one")
        if isinstance(node, CommentedMap):
            converted = {}
            for key in self._names(node):
                place, value = _child(node, key, mark)
                if isinstance(key, tuple | dict):
                    raise self._refuse(place, "found a list or mapping as key; allowed: a word")
                converted[self._text(str(key), place)] = self.convert(value, place, level + 1)
            return converted
        if isinstance(node, CommentedSeq):
            places = range(len(node))
            return [self.convert(node[at], node.lc.item(at), level + 1) for at in places]
        if node is None or isinstance(node, bool | ScalarBoolean):
            return None if node is None else bool(node)
        for kind in (int, float):
            if isinstance(node, kind):
                return kind(node)
        if isinstance(node, str | datetime.date):  # a date is text in YAML 1.2
            return self._text(str(node), mark)
        raise self._refuse(mark, f"found {type(node).__name__}; allowed: values of YAML 1.2")

    def _names(self, node: CommentedMap) -> list:
        """Return the keys of a mapping; those that it merges come first."""
        if id(node) not in self.names:
            merged = [name for source in node.merge for name in self._names(source)]
            self.names[id(node)] = list(dict.fromkeys([*merged, *node]))
        return self.names[id(node)]

    def _text(self, text: str, mark: Mark) -> str:
        if "\0" in text:
            raise self._refuse(mark, "found a text with the character NUL; allowed: any other")
        words = text.replace("/", " ").split()
        if len(text) > LETTERS and (longest := max(map(len, words), default=0)) > LETTERS:
            allowed = f"{LETTERS}, as in file names"
            raise self._refuse(mark, f"found a word of {longest:,} letters; allowed: {allowed}")
        return text

    def _refuse(self, mark: Mark, text: str) -> UserError:
        return UserError(f"{_place(self.path, mark)}: {text}")


def _place(path: str | Path, mark: Mark) -> str:
    return f"{path}:{mark[0] + 1}:{mark[1] + 1}"


def _has_child(node: Any, key: str | int) -> bool:
    if isinstance(node, CommentedMap):
        return key in node or any(str(name) == key for name in node)
    return isinstance(node, CommentedSeq) and isinstance(key, int) and key < len(node)


def _child(node: Any, key: Any, mark: Mark) -> tuple[Mark, Any]:
    """Return where a key stands, and its value; ``mark`` where it is merged from elsewhere."""
    if isinstance(node, CommentedSeq):
        return node.lc.item(key), node[key]
    name = key if key in node else next(name for name in node if str(name) == key)
    own = name in (node.lc.data or {})
    return (node.lc.key(name) if own else mark), node[name]
