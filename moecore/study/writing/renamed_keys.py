"""Keys of params.yaml that have another name since some version, renamed in users' files."""

import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ruamel.yaml.comments import CommentedMap

from moecore.core.files import UserError
from moecore.study.params_file import round_trip_writer


class RenamedKey(NamedTuple):
    """A key that ``version`` was the first to call otherwise.

    key: from the top of the file, where ``*`` is any key: ``methods.*.router.top``. name: the last
    word of it as it is now.
    """

    version: str
    key: str
    name: str


RENAMED_KEYS: tuple[RenamedKey, ...] = ()  # the oldest first


def rename_keys_in_text(text: str, renamed: Sequence[RenamedKey], path: str) -> str:
    """Return a YAML text with the new names; comments and order stay.

    Raises UserError where a mapping has the new name beside the old one.
    """
    writer = round_trip_writer(text)
    data = writer.load(text)
    is_changed = False
    for step in renamed:
        *above, old = step.key.split(".")
        for mapping in _mappings_at(data, above):
            if old not in mapping:
                continue
            if step.name in mapping:
                both = f"{step.key} is called {step.name} since moecore {step.version}"
                raise UserError(f"{path}: {both}, and both are there; allowed: one of them")
            _rename_key(mapping, old, step.name)
            is_changed = True
    if not is_changed:
        return text
    stream = io.StringIO()
    writer.dump(data, stream)
    return stream.getvalue()


def _mappings_at(data: Any, words: Sequence[str]) -> Iterator[CommentedMap]:
    if not isinstance(data, CommentedMap):
        return
    if not words:
        yield data
        return
    for key in list(data) if words[0] == "*" else [words[0]]:
        yield from _mappings_at(data.get(key), words[1:])


def _rename_key(mapping: CommentedMap, old: str, new: str) -> None:
    place = list(mapping).index(old)
    comment = mapping.ca.items.pop(old, None)
    mapping.insert(place, new, mapping.pop(old))
    if comment is not None:
        mapping.ca.items[new] = comment
