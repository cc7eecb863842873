"""A params.yaml, written from the layers of which it is composed."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from moecore.core.files import write_whole
from moecore.study.check import check_document
from moecore.study.document import load_yaml_document
from moecore.study.layers import Composed

HEAD = """\
# yaml-language-server: $schema={schema}
# Written by `moecore study write`, not by hand: edit {edited}, which says what differs from
# {base}, then write again. A comment says which files have a section.
"""
PROJECT_HEAD = """\
# yaml-language-server: $schema=params.schema.json
# All that a run depends on. Edit, then `make repro`: only what the change touches runs again.
"""
OVERLAY_HEAD = """\
# What this project says otherwise than the params.yaml of the installed moecore.
# `moecore study write` makes params.yaml and dvc.yaml of it.
"""
WIDTH = 100
ABSENT = object()


def _represent_text(representer: SafeRepresenter, value: str) -> Any:
    """A string; in quotes with a question mark, which libyaml misreads within braces."""
    style = "'" if "?" in value else None
    return representer.represent_scalar("tag:yaml.org,2002:str", value, style)


class _TextRepresenter(SafeRepresenter):
    yaml_representers: dict = {**SafeRepresenter.yaml_representers, str: _represent_text}


class ParamsOrigin(NamedTuple):
    """What the head of a written params.yaml names: the file to edit, the root's, the schema.

    folder: from which the names of further files count.
    """

    edited: str
    base: str
    schema: str
    folder: Path


def params_text(composed: Composed, origin: ParamsOrigin, presets: Sequence[str] = ()) -> str:
    """Return the text of a params.yaml; raises UserError where it is not in order.

    The places in messages are those in the files of its layers.
    """
    check_document(composed.document, composed.all_stages)
    head = HEAD.format(edited=origin.edited, base=origin.base, schema=origin.schema)
    if presets:
        head += f"# With the presets {', '.join(presets)}.\n"
    sections = [
        f"# {_name_origins(composed, key, origin)}\n{dump_inline_yaml({key: value})}"
        for key, value in composed.document.data.items()
    ]
    return "\n".join([head, *sections])


def write_params(path: Path, text: str) -> list[str]:
    """Write a params.yaml; return a line for every value that changes."""
    before = load_yaml_document(path).data if path.is_file() else {}
    write_whole(path, text)
    return list(list_changes(before, load_yaml_document(path).data))


def project_params_text(composed: Composed) -> str:
    """Return a whole params.yaml for a project to edit."""
    dumped = [dump_inline_yaml({key: one}) for key, one in composed.document.data.items()]
    return rewrite_data_paths("\n".join([PROJECT_HEAD, *dumped]))


def overlay_text(composed: Composed) -> str:
    """Return an overlay.yaml over the root's params.yaml that comes to the same."""
    base, values = composed.document.layers[0].sections, composed.document.data
    differing = {key: one for key, one in values.items() if one != base.get(key)}
    directives: dict[str, Any] = {"whole": [key for key in differing if key in base]}
    if composed.stages is not None:
        directives["stages"] = list(composed.stages)
    dumped = [dump_inline_yaml({key: one}) for key, one in (directives | differing).items()]
    return rewrite_data_paths(OVERLAY_HEAD + "\n".join(dumped))


def rewrite_data_paths(text: str) -> str:
    """Return a study's text with its paths of raw data as they are from a project's folder."""
    return text.replace("../../data/", "data/")


def list_changes(before: Any, after: Any, keys: str = "") -> Iterator[str]:
    """``key: old → new`` for every value that differs; of lists of mappings the entries alone."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{keys}.{key}" if keys else str(key)
            yield from list_changes(before.get(key, ABSENT), after.get(key, ABSENT), inner)
    elif _lists_mappings(before) and _lists_mappings(after):
        yield from (
            f"{keys}: {_show_value(entry)} → (absent)" for entry in before if entry not in after
        )
        yield from (
            f"{keys}: (absent) → {_show_value(entry)}" for entry in after if entry not in before
        )
    elif before != after:
        yield f"{keys}: {_show_value(before)} → {_show_value(after)}"


def _lists_mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _name_origins(composed: Composed, key: str, origin: ParamsOrigin) -> str:
    """The files that have a section, the deciding one last."""
    layers = composed.document.layers
    starts = [at for at, layer in enumerate(layers) if key in layer.whole]
    names = []
    for at, layer in enumerate(layers):
        if key in layer.sections and at >= max(starts, default=0):
            path = Path(layer.document.path)
            names.append(str(path.relative_to(origin.folder)) if at else origin.base)
    return " + ".join(dict.fromkeys(names))


def _show_value(value: Any) -> str:
    if value is ABSENT:
        return "(absent)"
    return json.dumps(value, ensure_ascii=False)


def dump_inline_yaml(value: Any) -> str:
    """YAML without anchors, in which lists and mappings of plain values take one line."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = None
    writer.sort_base_mapping_type_on_output = False
    writer.allow_unicode = True
    writer.width = WIDTH
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.Representer = _TextRepresenter
    writer.representer.ignore_aliases = lambda *_: True
    stream = io.StringIO()
    writer.dump(value, stream)
    return stream.getvalue()
