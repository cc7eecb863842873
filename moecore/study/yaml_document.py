"""YAML files as plain data (YAML 1.2, as DVC reads it), with line and column of every key.

``1e-4`` is a number, ``no``, ``on`` and ``yes`` are text, ``010`` is 10, and a duplicate key in a
mapping is an error. Messages show values as the file spells them, shortened.
"""

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
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
from moecore.core.source_layout import find_paper_folder_and_project

Mark = tuple[int, int]  # line and column, from 0

MAX_LEVELS = 64  # of a file
TOO_DEEP_TEXT = f"nested more than {MAX_LEVELS} levels deep; allowed: fewer"
MAX_BYTES = 300_000  # of a file: ours have 30 thousand
MAX_VALUES = 100_000  # of a file, with those that aliases repeat
OTHER_VERSION_PATTERN = re.compile(r"(?:\A\ufeff?|(?<=[\n\r]))%YAML\s(?!\s*1\.2(\s|\Z))[^\n\r]*")
# ruamel lets these pass for a tag that does not fit its value, such as `!!int x`, and for comments
# on both sides of a value
PYTHON_ERRORS = (ValueError, LookupError, TypeError, AttributeError, NotImplementedError)
READER_ERRORS = (YAMLError, *PYTHON_ERRORS)
MAX_WORD_LETTERS = 255  # of a word: no file has a longer name, and no similar one is searched
CONTROL_LETTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MAX_LINE_LETTERS = 1_500  # letters of a line
MAX_LINES = 20
SHOWN_LETTERS = 60  # letters of a value


@dataclass(frozen=True)
class YamlDocument:
    """A parsed YAML file: its data, and the file, line and column of each key."""

    path: str
    data: Any
    node: Any = None  # ruamel's mapping, list or value, which has the places
    start: Mark = (0, 0)  # where the document begins, if it is a part of its file

    @property
    def folders(self) -> tuple[Path, ...]:
        """The file's folder; for a run folder also those of its question and project."""
        folder = Path(self.path).parent
        return (folder, *find_paper_folder_and_project(folder))

    @property
    def packages(self) -> tuple[str, ...]:
        names = list_or_empty(dict_or_empty(self.data).get("packages"))
        return tuple(name for name in names if isinstance(name, str))

    def place(self, keys: Sequence[str | int]) -> str:
        """Return ``path:line:column`` of a key, or of its deepest existing parent."""
        node = self.node
        mark = self.start
        for key in keys:
            if not _has_child(node, key):
                break
            mark, node = _child(node, key, mark)
        return _place(self.path, mark)

    def error(self, keys: Sequence[str | int], text: str) -> UserError:
        """Return a UserError of one line: place, key and text."""
        return UserError(f"{self.place(keys)}: {spell_keys(keys)}: {shorten_to_one_line(text)}")

    def below(self, key: str | int) -> "YamlDocument":
        """Return the value at ``key`` as a document of its own."""
        mark, node = _child(self.node, key, self.start)
        return YamlDocument(self.path, self.data[key], node, mark)

    def get(self, keys: Sequence[str]) -> Any:
        """Return the value at nested ``keys``; UserError if a key is missing."""
        value = self.data
        for depth, key in enumerate(keys):
            present = list(dict_or_empty(value))
            if key not in present:
                holder = ".".join(keys[:depth]) or "the file"
                listed = ", ".join(present) or "no keys"
                missing = f"{'.'.join(keys)}: missing{did_you_mean(key, present)}"
                place = self.place(keys[:depth])
                raise UserError(shorten_to_one_line(f"{place}: {missing}; {holder} has: {listed}"))
            value = value[key]
        return value


def load_yaml_document(path: str | Path) -> YamlDocument:
    """Read a YAML file; UserError if it is missing, too large or invalid."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "start from the folder that holds it, or begin a project: `moecore new my_study`"
        raise UserError(f"{path}: cannot be read ({reason}); {hint}") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: found {len(content):,} bytes; allowed: up to {MAX_BYTES:,}")
    try:
        return parse_yaml_document(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        before = content[: error.start].split(b"\n")
        mark = (len(before) - 1, len(before[-1]))
        raise UserError(f"{_place(path, mark)}: not UTF-8 text (byte {error.start})") from None


def parse_yaml_document(text: str, path: str = "params.yaml") -> YamlDocument:
    """Parse one YAML document; UserError with line and column if it is invalid."""
    if other := OTHER_VERSION_PATTERN.search(text):
        place = _place(path, (text.count("\n", 0, other.start()), 0))
        directive = shorten_to_one_line(other[0].strip("\ufeff "), SHOWN_LETTERS)
        allowed = "YAML 1.2, as DVC reads every file; remove this line"
        raise UserError.at(place, found=directive, allowed=allowed)
    try:
        node = _load_nodes(text)
        return YamlDocument(path, _PlainDataConverter(path).convert(node, (0, 0), 0), node)
    except _UnfitNodeError as error:
        raise UserError(shorten_to_one_line(f"{_place(path, error.mark)}: {error}")) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(path, (mark.line, mark.column)) if mark else path
        reason = f"not valid YAML: {error.problem or error.context}"
        raise UserError(shorten_to_one_line(f"{place}: {reason}")) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; allowed: {MAX_LEVELS} levels") from None
    except READER_ERRORS as error:
        reason = f"not valid YAML: {type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(shorten_to_one_line(f"{path}: {reason}")) from None


@lru_cache(maxsize=16)  # one command reads the same few files often; nodes are never edited
def _load_nodes(text: str) -> Any:
    reader = YAML(typ="rt")
    reader.Composer = _Composer
    return reader.load(text)


class _UnfitNodeError(Exception):
    """Error for valid YAML that settings may not contain, with its line and column from 0."""

    def __init__(self, mark: Any, text: str) -> None:
        super().__init__(text)
        self.mark = (mark.line, mark.column)


class _Composer(Composer):
    """YAML composer that refuses deep nesting, and what DVC reads differently or not at all."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node; _UnfitNodeError if it is too deep, or if DVC cannot read it."""
        event = self.parser.peek_event()
        if self.level > MAX_LEVELS:
            raise _UnfitNodeError(event.start_mark, TOO_DEEP_TEXT)
        if getattr(event, "tag", None) == "!":  # without a value: None here, a text for DVC
            raise _UnfitNodeError(event.start_mark, "found the tag !; allowed: values without one")
        if not isinstance(event, AliasEvent) and event.anchor in self.anchors:
            first = self.anchors[event.anchor].start_mark.line + 1
            text = f"found the anchor &{event.anchor}; allowed: another name than in line {first}"
            raise _UnfitNodeError(event.start_mark, f"{text}: DVC reads no anchor twice")
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


class _PlainDataConverter:
    """Converts ruamel's nodes to dicts, lists and plain values."""

    # Aliases are followed; limits on values and levels also stop aliases that repeat each other.

    def __init__(self, path: str) -> None:
        self.path = path
        self.left = MAX_VALUES
        self.names: dict[int, list] = {}  # keys of a mapping by its id, as aliases repeat it

    def convert(self, node: Any, mark: Mark, level: int) -> Any:
        """Return a node at ``mark`` and nesting ``level`` as plain data; UserError if invalid."""
        self.left -= 1
        if self.left < 0:
            raise self._refuse(mark, f"found more than {MAX_VALUES:,} values; allowed: fewer")
        if level > MAX_LEVELS:
            raise self._refuse(mark, TOO_DEEP_TEXT)
        if getattr(getattr(node, "tag", None), "value", None):
            raise self._refuse(mark, f"found the tag {node.tag.value}; allowed: values without one")
        if isinstance(node, CommentedMap):
            converted = {}
            for key in self._keys_with_merged(node):
                place, value = _child(node, key, mark)
                if isinstance(key, tuple | dict):
                    raise self._refuse(place, "found a list or mapping as key; allowed: a word")
                converted[self._check_text(str(key), place)] = self.convert(value, place, level + 1)
            return converted
        if isinstance(node, CommentedSeq):
            return [self.convert(node[at], node.lc.item(at), level + 1) for at in range(len(node))]
        if node is None or isinstance(node, bool | ScalarBoolean):
            return None if node is None else bool(node)
        for kind in (int, float):
            if isinstance(node, kind):
                return kind(node)
        if isinstance(node, str | datetime.date):  # a date is text in YAML 1.2
            return self._check_text(str(node), mark)
        raise self._refuse(mark, f"found {type(node).__name__}; allowed: values of YAML 1.2")

    def _keys_with_merged(self, node: CommentedMap) -> list:
        """Return a mapping's keys; those merged by ``<<`` from other mappings come first."""
        if id(node) not in self.names:
            merged = [name for source in node.merge for name in self._keys_with_merged(source)]
            self.names[id(node)] = list(dict.fromkeys([*merged, *node]))
        return self.names[id(node)]

    def _check_text(self, text: str, mark: Mark) -> str:
        if "\0" in text:
            raise self._refuse(mark, "found a text with the character NUL; allowed: any other")
        longest = max(map(len, text.replace("/", " ").split()), default=0)
        if longest > MAX_WORD_LETTERS:
            allowed = f"{MAX_WORD_LETTERS}, as in file names"
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
    """Return ((line, column), value) of ``key`` in a node; ``mark`` if ``<<`` merged the key."""
    if isinstance(node, CommentedSeq):
        return node.lc.item(key), node[key]
    name = key if key in node else next(name for name in node if str(name) == key)
    is_direct = name in (node.lc.data or {})
    return (node.lc.key(name) if is_direct else mark), node[name]


def dict_or_empty(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def list_or_empty(value: Any) -> list:
    return value if isinstance(value, list) else []


def did_you_mean(word: Any, candidates: Sequence[Any]) -> str:
    """Return ``, did you mean 'x'?`` for a similar candidate, else ""."""
    if len(str(word)) > MAX_WORD_LETTERS:
        return ""
    close = get_close_matches(str(word), [str(name) for name in candidates], 1)
    return f", did you mean {close[0]!r}?" if close else ""


def shorten_to_one_line(text: str, limit: int = MAX_LINE_LETTERS) -> str:
    """Return one line of about ``limit`` letters; control characters are escaped."""
    if len(text) > limit:
        half = (limit - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return CONTROL_LETTERS.sub(lambda match: ascii(match[0])[1:-1], text)


def cap_line_count(lines: Sequence[str]) -> str:
    """Join the lines, at most MAX_LINES; a last line counts those left out."""
    more = len(lines) - MAX_LINES
    if more <= 1:
        return "\n".join(lines)
    path = re.sub(r":\d+:\d+: .*", "", lines[0])
    return "\n".join([*lines[:MAX_LINES], f"{path}: and {more:,} more; mend these first"])


def spell_keys(keys: Sequence[str | int]) -> str:
    """Return ``("a", 0, "b")`` as ``a[0].b``."""
    text = ""
    for key in keys:
        shown = shorten_to_one_line(str(key), SHOWN_LETTERS)
        text += f"[{key}]" if isinstance(key, int) else f".{shown}"
    return text.lstrip(".") or "(the whole file)"


def show_value(value: Any) -> str:
    """Return a value as text with its type: ``'two' (str)``."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        if value:
            return shorten_to_one_line(f"the keys {', '.join(map(str, value))}", 300)
        return "{}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return f"{shorten_to_one_line(text, SHOWN_LETTERS)} ({type(value).__name__})"
