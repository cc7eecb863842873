"""``key=value`` from the command line, written into params.yaml; comments and order stay."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from moecore.core.files import UserError, write_whole
from moecore.study.check import check_study
from moecore.study.document import (
    SHOWN_LETTERS,
    did_you_mean,
    load_yaml_document,
    parse_yaml_document,
    shorten_to_one_line,
)
from moecore.study.params_file import list_changes


def _represent_null(representer: RoundTripRepresenter, _: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


class _NullRepresenter(RoundTripRepresenter):
    yaml_representers: dict = {
        **RoundTripRepresenter.yaml_representers,
        type(None): _represent_null,
    }


def write_assignments(path: Path, assignments: Sequence[str]) -> list[str]:
    """Write the assignments into params.yaml; return a line for every value that changes.

    Raises UserError, the file as it was, where an assignment or the file with it is malformed.
    """
    before = load_yaml_document(path)
    old = path.read_text(encoding="utf-8")
    write_whole(path, apply_assignments(old, assignments))
    try:
        check_study(path)
    except UserError as error:
        write_whole(path, old)
        words = shorten_to_one_line(" ".join(f"-S {assignment}" for assignment in assignments))
        raise UserError(f"{error}\n{path}: left as it was ({words})") from None
    return list(list_changes(before.data, load_yaml_document(path).data))


def apply_assignments(text: str, assignments: Sequence[str]) -> str:
    """Return a YAML text with values replaced or added.

    assignments: ``pretrain.epochs=3``, ``methods.tgr.regularizers.0.weight=2``, whose values are
    YAML. A value that an alias repeats changes in every place.
    """
    writer = round_trip_writer(text)
    data = writer.load(text)
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UserError(f"-S {assignment}: expected key=value, such as pretrain.epochs=3")
        parse_yaml_document(value, f"-S {shorten_to_one_line(assignment, SHOWN_LETTERS)}")
        _set_value(data, name.strip().split("."), writer.load(value), assignment)
    stream = io.StringIO()
    writer.dump(data, stream)
    return stream.getvalue()


def round_trip_writer(text: str) -> YAML:
    """Return what reads and writes ``text`` so that comments, order and quotes stay."""
    writer = YAML(typ="rt")
    writer.preserve_quotes = True
    writer.width = max(map(len, text.splitlines()), default=80)
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.Representer = _NullRepresenter
    return writer


def _set_value(data: Any, words: Sequence[str], value: Any, assignment: str) -> None:
    """Set what stands at keys and places of lists; the last key of a mapping may be new."""
    for depth, word in enumerate(words):
        last = depth == len(words) - 1
        keys = dict(enumerate(data)) if isinstance(data, list) else data
        keys = {str(key): key for key in keys} if isinstance(keys, dict) else {}
        if word not in keys and not (last and isinstance(data, dict)):
            holder = ".".join(words[:depth]) or "the file"
            allowed = ", ".join(keys) or "nothing, it is a single value"
            hint = did_you_mean(word, list(keys))
            raise UserError(
                f"-S {assignment}: found {word!r} in {holder}{hint}; allowed: {allowed}"
            )
        if last:
            data[keys.get(word, word)] = value
        else:
            data = data[keys[word]]
