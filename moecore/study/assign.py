"""``key=value`` from the command line, written into params.yaml where the key stands.

Everything else in the file stays as it is: comments, order, spacing.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from moecore.core.files import UserError, write_whole
from moecore.study.document import Document, load, near, parse
from moecore.study.remembered import in_order
from moecore.study.written import changes

Keys = list[str | int]


def assign(path: Path, assignments: Sequence[str]) -> list[str]:
    """Write the assignments into params.yaml; returns a line for every value that changes.

    Raises UserError, with the file as it was, where an assignment is malformed or the file would
    not be in order with it.
    """
    before = load(str(path))
    old = path.read_text(encoding="utf-8")
    text = old
    for assignment in assignments:
        text = assigned(parse(text, str(path)), text, assignment)
    _write(path, text)
    try:
        in_order(path)
    except UserError as error:
        _write(path, old)
        words = " ".join(f"-S {assignment}" for assignment in assignments)
        raise UserError(f"{error}\n{path}: left as it was ({words})") from None
    return list(changes(before.data, parse(text, str(path)).data))


def assigned(document: Document, text: str, assignment: str) -> str:
    """``text``, of which ``document`` was read, with one value replaced or added.

    assignment: ``pretrain.epochs=3``, ``methods.tgr.regularizers.0.weight=2``, ``run.seeds=[0,1]``;
    the value is YAML.
    """
    name, equals, value = assignment.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise UserError(f"-S {assignment}: expected key=value, such as pretrain.epochs=3")
    wanted = parse(value, f"-S {assignment}").data
    keys, node = _found(document, name.strip().split("."), assignment)
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    if node is None:
        start, end, put = _room(document, keys, value.strip(), offsets, text)
    else:
        start, end, put = *_span(node, offsets, text), value.strip()
    changed = text[:start] + put + text[end:]
    expected = _with(document.data, keys, wanted)
    if not _reads(changed, expected):  # an anchor's value: its text stands elsewhere
        place = document.place(keys)
        raise UserError(f"{place}: {name}: shares its value with other keys; edit the file itself")
    return changed


def _reads(text: str, expected: Any) -> bool:
    try:
        return parse(text).data == expected
    except UserError:
        return False


def _found(document: Document, words: list[str], assignment: str) -> tuple[Keys, Node | None]:
    """The keys as the file has them, and the value's node; None where the last key is absent."""
    node = document.node
    keys: Keys = []
    for place, word in enumerate(words):
        step = list(_steps(node))
        names = [str(key) for key, _ in step]
        if word in names:
            key, node = step[len(names) - 1 - names[::-1].index(word)]
            keys.append(key)
            continue
        if place == len(words) - 1 and isinstance(node, MappingNode):
            return [*keys, word], None
        holder = ".".join(map(str, keys)) or "the file"
        allowed = ", ".join(names) or "nothing, it is a single value"
        hint = near(word, names)
        raise UserError(f"-S {assignment}: found {word!r} in {holder}{hint}; allowed: {allowed}")
    return keys, node


def _steps(node: Node | None) -> Iterator[tuple[str | int, Node]]:
    """Keys or places below a node."""
    if isinstance(node, MappingNode):
        yield from ((name.value, value) for name, value in node.value)
    elif isinstance(node, SequenceNode):
        yield from enumerate(node.value)


def _span(node: Node, offsets: Sequence[int], text: str) -> tuple[int, int]:
    """Where a value stands in the text, without the blank that follows a block."""
    start = offsets[node.start_mark.line] + node.start_mark.column
    end = offsets[node.end_mark.line] + node.end_mark.column
    return start, start + len(text[start:end].rstrip())


def _room(
    document: Document, keys: Keys, value: str, offsets: Sequence[int], text: str
) -> tuple[int, int, str]:
    """Where a new key goes in its mapping, as its first one, and what is put there."""
    node = document.node
    for key in keys[:-1]:
        node = next(value for name, value in reversed(list(_steps(node))) if name == key)
    assert isinstance(node, MappingNode)
    start, _ = _span(node, offsets, text)
    if node.flow_style:
        comma = ", " if node.value else ""
        return start + 1, start + 1, f"{keys[-1]}: {value}{comma}"
    indent = " " * node.start_mark.column
    return start, start, f"{keys[-1]}: {value}\n{indent}"


def _with(data: Any, keys: Keys, value: Any) -> Any:
    """A copy of ``data`` with one value replaced."""
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(data, list):
        return [
            _with(one, rest, value) if place == first else one for place, one in enumerate(data)
        ]
    inner = data.get(first) if isinstance(data, dict) else None
    return {**data, first: _with(inner, rest, value)}


def _write(path: Path, text: str) -> None:
    write_whole(path, text)
