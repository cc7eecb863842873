"""Composes a params.yaml from layers: the root's file, and files that state differences from it.

Each layer is merged over the previous layers. Mappings are merged, unless their kinds differ; any
other value, also a list, replaces the previous value. In addition:

- ``stages:`` lists the stages of dvc.yaml; by default the root's stages. Sections that no stage
  reads are left out.
- ``whole:`` lists sections that replace the previous ones instead of being merged.
- ``methods:`` names the methods that remain, except in a world and in a preset, which add methods.
  A method is merged over the method of the same name, or of the name under ``from``: the nearest
  one in the same layer, else in the previous layers.
- A section, a method or an entry of ``data`` that is null is removed. At deeper levels null is a
  value.

A project may have two layers: ``overlay.yaml`` over the params.yaml of the installed version. The
layers of a question are in ``questions.py``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core import files, source_layout
from moecore.study import params_reader, yaml_document
from moecore.study.stages import CODE_STAGE, MEASURE, PHASES, STAGE_SECTIONS
from moecore.study.study import StageSections, Study, stage_by_section

OVERLAY = "overlay.yaml"
LAYER_DIRECTIVES = ("stages", "whole")  # keys of a layer that are not sections
BASE_METHOD_KEY = "from"  # key of a method: the method that it is merged over


class SettingsLayer(NamedTuple):
    """The sections of one settings file, and how they are merged over lower layers."""

    # replaced: sections under ``whole``. names: the methods that remain, None for all. moved: keys
    # of ``sections`` whose text is at another key, such as run.seeds at seeds, or in another file,
    # such as claims of a paper.

    document: yaml_document.YamlDocument
    sections: Mapping[str, Any]
    stages: tuple[str, ...] | None = None
    replaced: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    moved: Mapping[params_reader.Keys, tuple[yaml_document.YamlDocument, params_reader.Keys]] = {}

    @property
    def methods(self) -> Mapping[str, Any]:
        return yaml_document.dict_or_empty(self.sections.get("methods"))

    def place(self, keys: params_reader.Keys) -> str:
        """Return ``path:line:column`` of a key, or of its deepest existing parent."""
        for start, (document, rest) in self.moved.items():
            if keys[: len(start)] == start:
                return document.place((*rest, *keys[len(start) :]))
        return self.document.place(keys)


Chain = tuple[tuple[SettingsLayer, str], ...]  # entries of methods: layer and name
Place = tuple[int, str]  # number of a layer, and name


@dataclass(frozen=True)
class LayeredDocument(yaml_document.YamlDocument):
    """Several layers as one document; a key's place is in the last layer that has it."""

    layers: tuple[SettingsLayer, ...] = ()
    methods: Mapping[str, Chain] = field(default_factory=dict)

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(Path(layer.document.path).parent for layer in self.layers))

    def place(self, keys: Sequence[str | int]) -> str:
        """Return ``path:line:column`` in the file that decides the value at ``keys``."""
        layers = layers_after_replacement(self.layers, keys[0]) if keys else self.layers
        places = [(layer, tuple(keys)) for layer in layers]
        if len(keys) > 1 and keys[0] == "methods":
            chain = self.methods.get(str(keys[1]), ())
            places = [(layer, ("methods", name, *keys[2:])) for layer, name in chain] or places
        layer, end = max(places[::-1], key=lambda row: count_existing_keys(row[0].sections, row[1]))
        return layer.place(end)


class ComposedParams(NamedTuple):
    document: LayeredDocument
    stages: tuple[str, ...] | None  # as named by layers; None: the root's stages
    all_stages: tuple[str, ...]  # the same, with the root's stages instead of None


def load_root_layer(root: Path) -> SettingsLayer:
    document = yaml_document.load_yaml_document(root / "params.yaml")
    return SettingsLayer(document, yaml_document.dict_or_empty(document.data))


def load_overlay_layer(folder: Path, root: SettingsLayer) -> SettingsLayer:
    layer = read_layer(yaml_document.load_yaml_document(folder / OVERLAY), root.document.packages)
    entries = layer.sections.get("methods")
    if isinstance(entries, dict):
        return layer._replace(names=tuple(entries))
    return layer


def read_layer(
    document: yaml_document.YamlDocument, packages: Sequence[str], directives: Sequence[str] = ()
) -> SettingsLayer:
    """Return a YAML document as a layer; directives: allowed keys that are not sections."""
    # packages: packages of earlier layers, whose names are sections, too.
    # Sections of single stages and measurements last
    names = sorted(Study.model_fields, key=lambda name: name in StageSections.model_fields)
    directives = (*LAYER_DIRECTIVES, *directives)
    allowed = (*directives, *names, *packages, *document.packages)
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        listed = f"allowed: sections of params.yaml ({', '.join(names)})"
        raise files.UserError(f"{document.place([])}: found no mapping; {listed}")
    for key in data:
        if key not in allowed:
            hint = yaml_document.did_you_mean(key, allowed)
            raise document.error([key], f"unknown section{hint}; allowed: {', '.join(allowed)}")
    sections = {key: section for key, section in data.items() if key not in directives}
    stages = _read_list(document, "stages", STAGE_SECTIONS)
    return SettingsLayer(document, sections, stages, _read_list(document, "whole", names) or ())


def compose_layers(layers: Sequence[SettingsLayer], root: Path) -> ComposedParams:
    """Merge layers, lowest first, to a params.yaml; root: folder of the main dvc.yaml."""
    values: dict[str, Any] = {}
    for layer in layers:
        for key, section in layer.sections.items():
            is_replaced = key in layer.replaced
            values[key] = section if is_replaced else merge_settings(values.get(key), section)
        values = {key: value for key, value in values.items() if value is not None}
        if isinstance(values.get("data"), dict):
            data = values["data"].items()
            values["data"] = {name: source for name, source in data if source is not None}
    chains: dict[str, Chain] = {}
    if isinstance(values.get("methods"), dict):
        chains = _compose_methods(layers)
        values["methods"] = dict.fromkeys(chains)
        for name, chain in chains.items():
            merged: Any = {}
            for layer, entry_name in chain:
                entry = layer.methods[entry_name]
                if isinstance(entry, dict):
                    entry = {key: value for key, value in entry.items() if key != BASE_METHOD_KEY}
                merged = merge_settings(merged, entry)
            values["methods"][name] = merged
    stages = next((source.stages for source in reversed(layers) if source.stages is not None), None)
    all_stages = list_dvc_stages(root) if stages is None else stages
    readers = stage_by_section(all_stages, values.get("run") or {})
    values = {key: value for key, value in values.items() if key in readers}
    for key in ("claims", "questions"):
        if key in values:
            values[key] = values.pop(key)  # written last, as they are the longest
    unread = {
        "data": set(PHASES[1:]) - set(all_stages),
        "run": set() if MEASURE in all_stages else {"measurements", "thorough"},
    }
    for key, names in unread.items():
        if isinstance(section := values.get(key), dict):
            values[key] = {name: value for name, value in section.items() if name not in names}
    path = layers[0].document.path
    document = LayeredDocument(path, values, None, layers=tuple(layers), methods=chains)
    return ComposedParams(document, stages, all_stages)


def merge_settings(base: Any, over: Any) -> Any:
    """Return ``over`` merged over ``base``; lists, and mappings of another ``kind``, replace it."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    if base.get("kind") != over.get("kind", base.get("kind")):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = merge_settings(base[key], value) if key in base else value
    return merged


def _compose_methods(layers: Sequence[SettingsLayer]) -> dict[str, Chain]:
    """Return method → (layer, name) of it and its bases (``from``), lowest first, or UserError."""
    names: dict[str, str] = {}  # name → its place in a list
    for layer in layers:
        if "methods" in layer.replaced:
            names = {}
        if layer.names is not None:
            numbered = enumerate(layer.names)
            names = {name: layer.place(("run", "methods", index)) for index, name in numbered}
        else:
            names |= dict.fromkeys(layer.methods, "")
        for name in [name for name, entry in layer.methods.items() if entry is None]:
            names.pop(name, None)
    chains = {name: _method_chain(name, layers) for name in names}
    for name, chain in chains.items():
        if not chain:
            candidates = _known_methods(layers)
            text = f"found {name!r}{yaml_document.did_you_mean(name, candidates)}; allowed: "
            text = f"{names[name]}: methods: {text}{', '.join(candidates)}"
            raise files.UserError(yaml_document.shorten_to_one_line(text))
    return chains


def _method_chain(
    name: str, layers: Sequence[SettingsLayer], above: tuple[Place, ...] = ()
) -> Chain:
    """Return (layer, name) of a method and bases not in ``above``, lowest first; () if unknown."""
    # above: the entries merged over this method.
    layers = layers_after_replacement(layers, "methods")
    for at, layer in reversed(list(enumerate(layers))):
        if name not in layer.methods:
            continue
        entry = layer.methods[name]
        if entry is None:
            return ()
        base = entry.get(BASE_METHOD_KEY, name) if isinstance(entry, dict) else name
        below = layers[:at] if base == name else layers[: at + 1]
        chain = () if (at, base) in above else _method_chain(base, below, (*above, (at, name)))
        if base != name and not chain:
            others = [other for other in _known_methods(below) if other != name]
            meant = yaml_document.did_you_mean(base, others)
            text = f"found {yaml_document.show_value(base)}{meant}; allowed: {', '.join(others)}"
            raise layer.document.error(("methods", name, BASE_METHOD_KEY), text)
        return (*chain, (layer, name))
    return ()


def layers_after_replacement(
    layers: Sequence[SettingsLayer], section: str | int
) -> Sequence[SettingsLayer]:
    """Return the layers from the last one that replaces ``section`` as a whole."""
    starts = [at for at, layer in enumerate(layers) if section in layer.replaced]
    return layers[starts[-1] :] if starts else layers


def _known_methods(layers: Sequence[SettingsLayer]) -> list[str]:
    return list(dict.fromkeys(name for layer in layers for name in layer.methods))


def _read_list(
    document: yaml_document.YamlDocument, key: str, allowed: Collection[str]
) -> tuple[str, ...] | None:
    """Return the list at ``key``; None if missing; UserError for entries not in ``allowed``."""
    entries = (document.data or {}).get(key)
    if entries is None:
        return None
    listed = f"allowed: a list of {', '.join(allowed)}"
    if not isinstance(entries, list):
        raise document.error([key], f"found no list; {listed}")
    for index, entry in enumerate(entries):
        if entry not in allowed:
            hint = yaml_document.did_you_mean(entry, [*allowed])
            raise document.error([key, index], f"found {entry!r}{hint}; {listed}")
    return tuple(entries)


def list_dvc_stages(folder: Path) -> tuple[str, ...]:
    """Return the names of all stages in a project's dvc.yaml files, except ``code``."""
    names: list[str] = []
    for path in source_layout.list_dvc_files(folder):
        document = yaml_document.load_yaml_document(path)
        stages = document.get(["stages"])
        if not isinstance(stages, dict):
            text = f"found {yaml_document.show_value(stages)}; allowed: stages by their names"
            raise document.error(["stages"], text)
        names += [name for name in stages if name != CODE_STAGE]
    return tuple(names)


def count_existing_keys(value: Any, keys: Sequence[str | int]) -> int:
    """Return how many leading ``keys`` exist in the nested ``value``."""
    for depth, key in enumerate(keys):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return depth
    return len(keys)
