"""A study as what differs from the root's params.yaml: ``overlay.yaml`` in a folder of its own.

Sections of the overlay are laid over the root's. Mappings are merged, unless their kinds differ;
everything else, lists too, takes the place of what was there. Beyond that:

- ``stages:`` lists the stages of the study's dvc.yaml; left out, it has the root's. Sections that
  none of them reads are left out of the study's params.yaml.
- ``whole:`` lists sections that are not laid over the root's, but take their place.
- ``methods:``, where it is there, names the study's methods, each laid over the root's of its name.
- A section, a method or an entry of ``data`` that is null is removed. Further in, null is a value.

Presets (entries of ``presets.yaml``, by name) are laid over that; their methods are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError
from moecore.core.source_layout import list_project_dvc_files
from moecore.measure.base import builtin_measurements
from moecore.study.reading.document import Document, load_yaml_document
from moecore.study.reading.message_format import did_you_mean, show_value
from moecore.study.reading.setting_errors import format_error_line
from moecore.study.reading.study import (
    REDUCING_PHASES,
    SECTIONS,
    TRAINING_PHASES,
    Study,
    stage_by_section,
)

OVERLAY = "overlay.yaml"
PRESETS_FILE = "presets.yaml"
DIRECTIVES = ("stages", "whole")  # keys of an overlay that are no sections
NAMED_SECTIONS = ("data", "methods")  # sections whose entries have names


@dataclass(frozen=True)
class LayeredFiles(Document):
    """Several files laid over each other; a key stands in the last file that has it."""

    layers: tuple[Document, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders of all its files."""
        return tuple(dict.fromkeys(Path(layer.path).parent for layer in self.layers))

    def place(self, keys: Sequence[str | int]) -> str:
        """``path:line:column`` in the file that decides the value at ``keys``."""
        best = max(reversed(self.layers), key=lambda layer: _depth(layer.data, keys))
        return best.place(keys)


class ResolvedStudy(NamedTuple):
    """A study as its overlay and presets come out."""

    document: Document  # the whole of its params.yaml; places are those in root, overlay, presets
    stages: tuple[str, ...] | None  # None: all of the root's
    whole: tuple[str, ...]  # sections that are not laid over the root's
    layers: tuple[Document, ...]  # root, overlay, presets


def resolve_overlay(folder: Path, root: Path, presets: Sequence[str] = ()) -> ResolvedStudy:
    """Return the study in ``folder`` with these presets, in order, over the root's params.yaml.

    Raises UserError where a file cannot be read, or names a section, stage or preset that is none.
    """
    base = load_yaml_document(root / "params.yaml")
    sections = (*_section_names(), *base.packages)
    overlay = _check_sections(load_yaml_document(folder / OVERLAY), (*sections, *DIRECTIVES))
    stages = _read_list(overlay, "stages", tuple(SECTIONS))
    whole = _read_list(overlay, "whole", _section_names()) or ()
    values = _overlay_sections(base.data, overlay.data, whole)
    layers = [base, overlay]
    for name in presets:
        layers.append(_load_preset(folder, name))
        values = merge_settings(values, layers[-1].data)
    runs = list_folder_stages(root) if stages is None else stages
    wanted = stage_by_section(runs, values.get("run") or {})
    values = {key: value for key, value in values.items() if key in wanted}
    for key in ("claims", "questions"):
        if key in values:
            values[key] = values.pop(key)  # the longest, so they are written last
    _narrow_to_stages(values, runs)
    document = LayeredFiles(base.path, values, None, layers=tuple(layers))
    return ResolvedStudy(document, stages, whole, tuple(layers))


def merge_settings(base: Any, over: Any) -> Any:
    """Return ``over`` laid over ``base``; changes neither."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    if base.get("kind") != over.get("kind", base.get("kind")):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = merge_settings(base[key], value) if key in base else value
    return merged


def load_study_presets(folder: Path) -> dict[str, Document]:
    """Return name → the presets of a study; none where it has no ``presets.yaml``.

    Raises UserError where the file cannot be read or is no mapping of names.
    """
    path = folder / PRESETS_FILE
    if not path.is_file():
        return {}
    whole = load_yaml_document(path)
    if not isinstance(whole.data, dict):
        raise UserError(f"{path}:1:1: found no mapping; allowed: presets by their names")
    return {name: whole.below(name) for name in whole.data}


def _overlay_sections(
    base: Mapping[str, Any], overlay: Mapping[str, Any], whole: Sequence[str]
) -> dict[str, Any]:
    """The overlay's sections over the root's, without what the overlay removes."""
    values = dict(base)
    for key, section in overlay.items():
        if key in DIRECTIVES:
            continue
        values[key] = section if key in whole else merge_settings(base.get(key), section)
        if key in NAMED_SECTIONS and isinstance(section, dict):
            values[key] = _remaining_entries(key, values[key], section)
    return {key: value for key, value in values.items() if value is not None}


def _remaining_entries(
    key: str, merged: Mapping[str, Any], section: Mapping[str, Any]
) -> dict[str, Any]:
    """The entries that stay: of methods those that the overlay names; none that it sets to null."""
    gone = {name for name, entry in section.items() if entry is None}
    kept = section if key == "methods" else merged
    return {name: merged[name] for name in kept if name not in gone}


def _narrow_to_stages(values: dict[str, Any], stages: Sequence[str]) -> None:
    """Leave out the data of phases, and the keys of ``run``, that no stage looks at."""
    data, run = values.get("data"), values.get("run")
    if isinstance(data, dict):
        unused = {*TRAINING_PHASES[1:], *REDUCING_PHASES} - set(stages)
        values["data"] = {name: source for name, source in data.items() if name not in unused}
    if isinstance(run, dict) and "measure" not in stages:
        unused = ("measurements", "thorough")
        values["run"] = {key: value for key, value in run.items() if key not in unused}


def _read_list(overlay: Document, key: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """The list at ``key``; None where there is none. UserError where an entry is not allowed."""
    words = overlay.data.get(key)
    if words is None:
        return None
    listed = f"allowed: a list of {', '.join(allowed)}"
    if not isinstance(words, list):
        raise UserError(format_error_line(overlay, [key], f"found no list; {listed}"))
    for index, word in enumerate(words):
        if word not in allowed:
            text = f"found {word!r}{did_you_mean(word, allowed)}; {listed}"
            raise UserError(format_error_line(overlay, [key, index], text))
    return tuple(words)


def list_folder_stages(folder: Path) -> tuple[str, ...]:
    """Return the stages of the dvc.yaml in ``folder`` that read params.yaml; none without one."""
    names: list[str] = []
    for path in list_project_dvc_files(folder):
        document = load_yaml_document(path)
        stages = document.get(["stages"])
        if not isinstance(stages, dict):
            text = f"found {show_value(stages)}; allowed: stages by their names"
            raise UserError(format_error_line(document, ["stages"], text))
        names += [name for name in stages if name != "code"]
    return tuple(names)


def _section_names() -> tuple[str, ...]:
    """The sections that a params.yaml may have; those of measurements last."""
    return tuple(sorted(Study.model_fields, key=lambda name: name in builtin_measurements()))


def _load_preset(folder: Path, name: str) -> Document:
    known = load_study_presets(folder)
    if name not in known:
        allowed = ", ".join(known) or "none, it has no presets"
        hint = did_you_mean(name, list(known))
        raise UserError(f"{folder}: found no preset {name!r}{hint}; allowed: {allowed}")
    return _check_sections(known[name], _section_names())


def _check_sections(document: Document, allowed: Sequence[str]) -> Document:
    """An overlay or preset; UserError where a key of it is not allowed."""
    if document.data is None:
        return Document(document.path, {}, None)
    if not isinstance(document.data, dict):
        listed = f"allowed: sections of params.yaml ({', '.join(allowed)})"
        raise UserError(f"{document.place([])}: found no mapping; {listed}")
    for key in document.data:
        if key not in (*allowed, *document.packages):
            hint = did_you_mean(key, allowed)
            text = f"unknown section{hint}; allowed: {', '.join(allowed)}"
            raise UserError(format_error_line(document, [key], text))
    return document


def _depth(value: Any, keys: Sequence[str | int]) -> int:
    """Return how many of ``keys``, from the first on, lead further into ``value``."""
    for depth, key in enumerate(keys):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return depth
    return len(keys)
