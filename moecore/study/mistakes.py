"""What is wrong, in words: with values of a file whatever their keys, and with parts.

What parts refuse is said as a key of params.yaml or a file, and words.
"""

import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ruamel.yaml.error import StringMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from moecore.core.files import UserError
from moecore.core.sources import FAMILIES, ROOT

LONG = 255  # letters of a word and of a number: no file has a longer name
WORDS = re.compile(r"[\s/]+")  # what lies between them
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
LINE = 1_500  # letters of a line
LINES = 20

FOLDERS = tuple(ROOT / "moecore" / family for family in (*FAMILIES, "measure"))
MEASUREMENT = {  # what the file of a measurement has
    "Result": "class Result(Config)",
    "applies": "def applies(subject: Subject) -> str | None",
    "measure": "def measure(subject: Subject, settings: …, parts: Parts) -> Result",
}

REFUSED = (
    UserError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    LookupError,
    NameError,
    AssertionError,
    ArithmeticError,
)
KEYED = re.compile(
    r"((?:model|teacher|router|text|experts|blocks|finetune|regions)(?:\.\w+)*)(: | is )"
)


def mistake_in(error: Exception) -> str:
    """``file:line: TypeError: …`` of the part that made it, or what the part lacks.

    Raises the error again where no file of a family of parts took part: it is no part's mistake.
    """
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(Path(error.filename))}:{error.lineno}: {said}"
    if isinstance(error, AttributeError) and (owner := _part_of(error.obj)):
        allowed = MEASUREMENT.get(str(error.name), f"an attribute {error.name}")
        return f"{shown(owner)} lacks {error.name}; allowed: {allowed}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.parent in FOLDERS and file.name != "base.py":
            return f"{shown(file)}:{frame.lineno}: {said}"
    raise error


def shown(file: Path) -> Path:
    """A path as a message names it: below the root where it lies there."""
    return file.relative_to(ROOT) if file.is_relative_to(ROOT) else file


def file_of(part: Any) -> Path:
    """Where a class, a function or a module is written."""
    if isinstance(part, ModuleType):
        return Path(part.__file__ or "?")
    code = getattr(part, "__code__", None)
    if code is not None:
        return Path(code.co_filename)
    owner = part if isinstance(part, type) else type(part)
    return Path(getattr(sys.modules.get(owner.__module__), "__file__", None) or "?")


def _part_of(part: Any) -> Path | None:
    """The file of a family in which ``part`` is written; None where it is in none."""
    file = file_of(part)
    return file if file.parent in FOLDERS and file.name != "base.py" else None


def placed(
    error: Exception, name: str, method: Any, phase: str, settings: Any
) -> tuple[tuple, str]:
    """Where in params.yaml to mend what a constructor of ``methods.<name>`` refused, and its words.

    phase, settings: of the training that builds it. An error that is no refusal is a mistake in a
    part, and named with its line; it is raised again where it does not come from a part.
    """
    key, text = worded(error)
    if key[:1] == ("model",):
        own = key[1:] and key[1] in method.model
        where = ("methods", name, *key) if own else key
        return where, f"{text} (data.{phase})" if "image" in text else text
    asked = getattr(settings, "k", None)
    if key in (("finetune", "k"), ("router", "k"), ("router", "router", "k")) and asked is not None:
        return (phase, "k"), f"{text} (methods.{name})"
    return ("methods", name, *key), text


def worded(error: Exception) -> tuple[tuple[str, ...], str]:
    """The keys with which a refusal begins, and the rest of it: ``found …; allowed: …``."""
    if not isinstance(error, (UserError, ValueError)):
        return (), mistake_in(error)
    text = str(error)
    match = KEYED.match(text)
    if match is None:
        return (), text
    rest = text[match.end() :]
    if not rest.startswith("found "):
        rest = f"found {rest}"
    return tuple(match[1].split(".")), rest


Fault = tuple[StringMark, str]


def plain(text: str, most: int = LINE) -> str:
    """A text as one line of at most so many letters: control characters are spelled, the middle is
    left out; what is allowed stands at the end.
    """
    if len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def cut(lines: Sequence[str]) -> str:
    """The first lines, and how many more there are: nobody reads ten thousand."""
    more = len(lines) - LINES
    if more <= 1:
        return "\n".join(lines)
    path = re.sub(r":\d+:\d+: .*", "", lines[0])
    return "\n".join([*lines[:LINES], f"{path}: and {more:,} more; mend these first"])


def values_of(node: Node, known: dict[int, int] | None = None) -> int:
    """How many values a node stands for, with those that its aliases repeat; each is looked at
    once. One that contains itself counts as none here.
    """
    known = {} if known is None else known
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 0
    known[id(node)] = 1 + sum(values_of(value, known) for value in _inner(node))
    return known[id(node)]


def _inner(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [value for _, value in node.value]
    return node.value if isinstance(node, SequenceNode) else []


def faults_of(node: Node) -> Iterator[Fault]:
    """Keys that are written twice or are none, aliases that contain themselves, and odd words."""
    yield from _faults(node, set(), set())


def _faults(node: Node, above: set[int], done: set[int]) -> Iterator[Fault]:
    """Those below ``node``; each node is gone through once, however many aliases lead to it."""
    if id(node) in above:
        yield node.start_mark, "this value contains itself through an alias"
        return
    if id(node) in done:
        return
    above.add(id(node))
    if isinstance(node, MappingNode):
        yield from _keys(node)
    elif isinstance(node, ScalarNode):
        yield from _word(node)
    for value in _inner(node):
        yield from _faults(value, above, done)
    above.remove(id(node))
    done.add(id(node))


def _word(node: ScalarNode) -> Iterator[Fault]:
    if not str(node.tag).endswith(":str"):
        if len(node.value) > LONG:
            what = "an integer" if str(node.tag).endswith(":int") else "a number"
            found = f"not valid YAML: {node.value[:40]!r} is not {what}"
            yield node.start_mark, f"{found} of up to {LONG} letters, it has {len(node.value):,}"
    elif "\0" in node.value:
        yield node.start_mark, "found a text with the character NUL; allowed: any other"
    elif len(node.value) > LONG and (long := max(map(len, WORDS.split(node.value)))) > LONG:
        yield node.start_mark, f"found a word of {long} letters; allowed: {LONG}, as in file names"


def _keys(node: MappingNode) -> Iterator[Fault]:
    first: dict[tuple[str, str], StringMark] = {}
    for key, _ in node.value:
        if not isinstance(key, ScalarNode):
            what = "a list" if isinstance(key, SequenceNode) else "a mapping"
            yield key.start_mark, f"found {what} as a key; allowed: a word"
            continue
        yield from _word(key)
        name = (str(key.tag), key.value)  # `1` and `"1"` are two keys
        if name in first:
            line = first[name].line + 1
            shown = plain(repr(key.value), 60)
            yield key.start_mark, f"key {shown} is written twice, first on line {line}; keep one"
        first.setdefault(name, key.start_mark)
