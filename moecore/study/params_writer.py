"""Writes params.yaml: composed from layers, or edited with its comments and order kept."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter, SafeRepresenter

from moecore.core.files import UserError, write_atomic
from moecore.study import check, yaml_document
from moecore.study.params_layers import ComposedParams, layers_after_replacement

COMPOSED_HEAD = """\
# yaml-language-server: $schema={schema}
# Written by `moecore study write`, not by hand: edit {edited}, which says what differs from
# {base}, then write again. A comment says which files have a section.
"""
PROJECT_HEAD = """\
# yaml-language-server: $schema=params.schema.json
# All that a run depends on. Edit, then `make repro`: only what the change touches runs again.
"""
OVERLAY_HEAD = """\
# What differs in this project from the params.yaml of the installed moecore.
# `moecore study write` makes params.yaml and dvc.yaml from it.
"""
LINE_WIDTH = 100
ABSENT = object()


class _TextRepresenter(SafeRepresenter):
    def represent_str(self, data: str) -> Any:
        """Quote strings with a question mark, which libyaml misreads within braces."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, "'" if "?" in data else None)

    yaml_representers: dict = {**SafeRepresenter.yaml_representers, str: represent_str}


class _NullRepresenter(RoundTripRepresenter):
    def represent_none(self, data: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")

    yaml_representers: dict = {**RoundTripRepresenter.yaml_representers, type(None): represent_none}


class ParamsOrigin(NamedTuple):
    edited: str  # file to edit
    base: str  # the root's file
    schema: str
    folder: Path  # base of paths


def params_text(composed: ComposedParams, origin: ParamsOrigin, presets: Sequence[str] = ()) -> str:
    """Return a composed params.yaml as text, with ``presets`` in its head; UserError if invalid."""
    check.check_without_data(composed.document, composed.all_stages)
    head = COMPOSED_HEAD.format(edited=origin.edited, base=origin.base, schema=origin.schema)
    if presets:
        head += f"# With the presets {', '.join(presets)}.\n"
    texts = [head]
    root = composed.document.layers[0]
    for key, value in composed.document.data.items():
        names = []  # of the files that have a section, the one that decides last
        for layer in layers_after_replacement(composed.document.layers, key):
            if key in layer.sections:
                path = Path(layer.document.path)
                names.append(origin.base if layer is root else str(path.relative_to(origin.folder)))
        texts.append(f"# {' + '.join(dict.fromkeys(names))}\n{dump_inline_yaml({key: value})}")
    return "\n".join(texts)


def write_and_diff_params(path: Path, text: str) -> list[str]:
    """Write a params.yaml; return one line ``key: old → new`` per changed value."""
    before = yaml_document.load_yaml_document(path).data if path.is_file() else {}
    write_atomic(path, text)
    return list(list_changes(before, yaml_document.load_yaml_document(path).data))


def project_params_text(composed: ComposedParams) -> str:
    dumped = [dump_inline_yaml({key: section}) for key, section in composed.document.data.items()]
    return rewrite_data_paths("\n".join([PROJECT_HEAD, *dumped]))


def overlay_text(composed: ComposedParams) -> str:
    base = composed.document.layers[0].sections
    values = composed.document.data
    differing = {key: section for key, section in values.items() if section != base.get(key)}
    directives: dict[str, Any] = {"whole": [key for key in differing if key in base]}
    if composed.stages is not None:
        directives["stages"] = list(composed.stages)
    dumped = [dump_inline_yaml({key: section}) for key, section in (directives | differing).items()]
    return rewrite_data_paths(OVERLAY_HEAD + "\n".join(dumped))


def rewrite_data_paths(text: str) -> str:
    return text.replace("../../data/", "data/")


def list_changes(before: Any, after: Any, keys: str = "") -> Iterator[str]:
    """Yield ``key: old → new`` for every value that differs between two nested mappings."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{keys}.{key}" if keys else str(key)
            yield from list_changes(before.get(key, ABSENT), after.get(key, ABSENT), inner)
        return
    changes = [(before, after)] if before != after else []
    values = (before, after)
    if all(isinstance(value, list) and value and isinstance(value[0], dict) for value in values):
        changes = [(entry, ABSENT) for entry in before if entry not in after]
        changes += [(ABSENT, entry) for entry in after if entry not in before]
    for pair in changes:
        old, new = (
            "(absent)" if value is ABSENT else json.dumps(value, ensure_ascii=False)
            for value in pair
        )
        yield f"{keys}: {old} → {new}"


def dump_inline_yaml(value: Any) -> str:
    """Return a value as YAML; innermost lists and mappings are on one line."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = None
    writer.sort_base_mapping_type_on_output = False
    writer.allow_unicode = True
    writer.width = LINE_WIDTH
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.Representer = _TextRepresenter
    writer.representer.ignore_aliases = lambda *_: True
    return _dump_to_text(writer, value)


def _dump_to_text(writer: YAML, value: Any) -> str:
    stream = io.StringIO()
    writer.dump(value, stream)
    return stream.getvalue()


def write_assignments(path: Path, assignments: Sequence[str]) -> list[str]:
    """Write each ``key=value`` into a params.yaml; return ``key: old → new`` per change."""
    # The file stays as it was if the result is invalid.
    before = yaml_document.load_yaml_document(path)
    old = path.read_text(encoding="utf-8")
    write_atomic(path, apply_assignments(old, assignments))
    try:
        check.check_study(path)
    except UserError as error:
        write_atomic(path, old)
        text = " ".join(f"-S {assignment}" for assignment in assignments)
        arguments = yaml_document.shorten_to_one_line(text)
        raise UserError(f"{error}\n{path}: left as it was ({arguments})") from None
    return list(list_changes(before.data, yaml_document.load_yaml_document(path).data))


def apply_assignments(text: str, assignments: Sequence[str]) -> str:
    # assignments: ``pretrain.epochs=3``, ``methods.tgr.regularizers.0.weight=2``, whose values are
    # YAML. A value that an alias repeats changes in every place.
    writer = round_trip_writer(text)
    data = writer.load(text)
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UserError(f"-S {assignment}: expected key=value, such as pretrain.epochs=3")
        yaml_document.parse_yaml_document(
            value,
            f"-S {yaml_document.shorten_to_one_line(assignment, yaml_document.SHOWN_LETTERS)}",
        )
        _set_value(data, name.strip().split("."), writer.load(value), assignment)
    return _dump_to_text(writer, data)


def round_trip_writer(text: str) -> YAML:
    writer = YAML(typ="rt")
    writer.preserve_quotes = True
    writer.width = max(map(len, text.splitlines()), default=80)
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.Representer = _NullRepresenter
    return writer


def _set_value(data: Any, segments: Sequence[str], value: Any, assignment: str) -> None:
    """Set the nested value at ``segments`` in place; UserError if a key before the last is new."""
    for depth, segment in enumerate(segments):
        last = depth == len(segments) - 1
        keys = dict(enumerate(data)) if isinstance(data, list) else data
        keys = {str(key): key for key in keys} if isinstance(keys, dict) else {}
        if segment not in keys and not (last and isinstance(data, dict)):
            part = ".".join(segments[:depth]) or "the file"
            names = ", ".join(keys) or "nothing, it is a single value"
            hint = yaml_document.did_you_mean(segment, list(keys))
            raise UserError(f"-S {assignment}: found {segment!r} in {part}{hint}; allowed: {names}")
        if last:
            data[keys.get(segment, segment)] = value
        else:
            data = data[keys[segment]]


class RenamedKey(NamedTuple):
    # key: the old key from the top of the file, where ``*`` is any key or index:
    # ``methods.*.router.top``. name: the new last word; None: removed.

    version: str
    key: str
    name: str | None


_WITH_VIEWS = "pretrain finetune adversarial teacher.training routing routing.augmentations.*"
# The oldest first.
RENAMED_KEYS = tuple(
    RenamedKey("0.3.0", f"{place}.views.size", None)
    for place in [*_WITH_VIEWS.split(), "explorer.augmentations.*"]
)


def rename_keys_in_text(text: str, renamed: Sequence[RenamedKey], path: str) -> str:
    writer = round_trip_writer(text)
    data = writer.load(text)
    is_changed = False
    for step in renamed:
        *above, old = step.key.split(".")
        for mapping in _mappings_matching(data, above):
            if old not in mapping:
                continue
            if step.name in mapping:
                both = f"{step.key} is called {step.name} since moecore {step.version}"
                raise UserError(f"{path}: {both}, and both are there; allowed: one of them")
            place = list(mapping).index(old)
            comment = mapping.ca.items.pop(old, None)
            value = mapping.pop(old)
            name = step.name
            if name is not None:
                mapping.insert(place, name, value)
            elif place:  # the comment ends with the lines above the next key
                name = list(mapping)[place - 1]
            if comment is not None and name is not None:
                mapping.ca.items.setdefault(name, comment)
            is_changed = True
    return _dump_to_text(writer, data) if is_changed else text


def _mappings_matching(data: Any, segments: Sequence[str]) -> Iterator[CommentedMap]:
    if isinstance(data, CommentedSeq) and segments and segments[0] == "*":
        for entry in data:
            yield from _mappings_matching(entry, segments[1:])
    if not isinstance(data, CommentedMap):
        return
    if not segments:
        yield data
        return
    for key in list(data) if segments[0] == "*" else [segments[0]]:
        yield from _mappings_matching(data.get(key), segments[1:])
