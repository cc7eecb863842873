"""A study's params.yaml, written from the root's, its overlay and its presets."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from moecore.core.files import write_whole
from moecore.core.source_layout import SHIPPED
from moecore.study.checking.validate import check_document
from moecore.study.reading.document import load_yaml_document
from moecore.study.reading.overlay import ResolvedStudy, list_folder_stages, resolve_overlay

HEAD = """\
# yaml-language-server: $schema={schema}
# Written by `moecore study write`, not by hand: edit overlay.yaml, which says what differs from
# {base}, then write again. A comment says in which of them a section stands.
"""
PROJECT_HEAD = """\
# yaml-language-server: $schema=params.schema.json
# All that a run depends on. Edit, then `make repro`: only what the change touches runs again.
"""
SHIPPED_PARAMS = "moecore's params.yaml"
WIDTH = 100
ABSENT = object()


def _represent_text(representer: SafeRepresenter, value: str) -> Any:
    """A string; in quotes with a question mark, which libyaml misreads within braces."""
    style = "'" if "?" in value else None
    return representer.represent_scalar("tag:yaml.org,2002:str", value, style)


class _TextRepresenter(SafeRepresenter):
    yaml_representers: dict = {**SafeRepresenter.yaml_representers, str: _represent_text}


def write_params(folder: Path, root: Path, presets: Sequence[str] = ()) -> Iterator[str]:
    """Write the study's params.yaml; yields a line for every value that changes.

    Raises UserError, and writes nothing, where the result would not be in order; the places are
    those in the overlay, the presets and the root's params.yaml.
    """
    text = params_text(folder, root, presets)
    path = folder / "params.yaml"
    before = load_yaml_document(path).data if path.is_file() else {}
    write_whole(path, text)
    yield from list_changes(before, load_yaml_document(path).data)


def params_text(folder: Path, root: Path, presets: Sequence[str] = ()) -> str:
    """Return what the study's params.yaml should say; raises UserError where it is not in order."""
    resolved = resolve_overlay(folder, root, presets)
    stages = list_folder_stages(root) if resolved.stages is None else resolved.stages
    check_document(resolved.document, stages)
    base, schema = SHIPPED_PARAMS, "params.schema.json"
    if root != SHIPPED:
        up = os.path.relpath(root, folder)
        base, schema = f"{up}/params.yaml", f"{up}/{schema}"
    head = HEAD.format(base=base, schema=schema)
    if presets:
        head += f"# With the presets {', '.join(presets)}.\n"
    sections = [
        f"# {_name_origins(resolved, key, base)}\n{dump_inline_yaml({key: value})}"
        for key, value in resolved.document.data.items()
    ]
    return "\n".join([head, *sections])


def shipped_params_text(study: str | None) -> str:
    """Return the whole params.yaml of a study of ours, or the main one, for a project to edit."""
    if study is None:
        text = (SHIPPED / "params.yaml").read_text(encoding="utf-8")
    else:
        sections = resolve_overlay(SHIPPED / "pipelines" / study, SHIPPED).document.data
        dumped = [dump_inline_yaml({key: value}) for key, value in sections.items()]
        text = "\n".join([PROJECT_HEAD, *dumped])
    return rewrite_data_paths(text)


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


def _name_origins(resolved: ResolvedStudy, key: str, base_name: str) -> str:
    """The files that have a section, the deciding one last."""
    base, *others = resolved.layers
    names = [base_name] if key in base.data and key not in resolved.whole else []
    folder = Path(others[0].path).parent
    names += [str(Path(layer.path).relative_to(folder)) for layer in others if key in layer.data]
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
