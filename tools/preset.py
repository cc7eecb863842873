"""Put presets into a study: ``python tools/preset.py pipelines/prc flowers`` (without a name: list them).

A preset, ``presets/<name>.yaml``, holds sections of params.yaml. Its mappings are merged into those of the study's params.yaml,
everything else in it (a list, a number, a mapping of another ``kind``) replaces what was there. The result is validated, then
takes the place of the study's params.yaml; sections that no preset touches keep their text and comments.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from moecore.files import StageError, whole_file
from moecore.study import check
from moecore.yaml12 import Document, load, near, parse

SECTION = re.compile(r"^(?=\w+:)", re.MULTILINE)
ABSENT = object()


class _Dumper(yaml.SafeDumper):
    """Plain text without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def merge(base: Any, preset: Any) -> Any:
    """``preset`` laid over ``base``: mappings are merged, unless their kinds differ; all else is replaced. Changes neither."""
    if not (isinstance(base, dict) and isinstance(preset, dict)) or base.get("kind") != preset.get("kind", base.get("kind")):
        return preset
    return base | {key: merge(base[key], value) if key in base else value for key, value in preset.items()}


def presets(folder: Path) -> dict[str, Path]:
    """Name → file of the presets of a study."""
    return {path.stem: path for path in sorted((folder / "presets").glob("*.yaml"))}


def read_preset(folder: Path, name: str, sections: Sequence[str]) -> dict[str, Any]:
    """The preset ``name`` of a study whose params.yaml has these sections; StageError where it is unknown or does not fit."""
    known = presets(folder)
    if name not in known:
        raise StageError(f"{folder}: found no preset {name!r}{near(name, list(known))}; allowed: {', '.join(known) or 'none, it has no presets'}")
    document = load(str(known[name]))
    if not isinstance(document.data, dict):
        raise StageError(f"{document.path}:1:1: found no mapping; allowed: sections of params.yaml ({', '.join(sections)})")
    for section in document.data:
        if section not in sections:
            raise StageError(f"{document.place([section])}: {section}: unknown section{near(section, sections)}; allowed: {', '.join(sections)}")
    return document.data


def with_presets(folder: Path, names: Sequence[str]) -> tuple[str, Document]:
    """The text of the study's params.yaml after these presets, in order, and what stood there before.

    Raises StageError where a file cannot be read, a preset is unknown, or a section cannot be written back.
    """
    before = load(str(folder / "params.yaml"))
    data = before.data
    for name in names:
        data = merge(data, read_preset(folder, name, list(before.data)))
    head, *sections = SECTION.split((folder / "params.yaml").read_text(encoding="utf-8"))
    text = head + "".join(_section(section, before.data, data, names) for section in sections)
    if not _means(text, data):
        raise StageError(f"{before.path}: its sections cannot be rewritten one by one; write out aliases of other sections, and no name in quotes")
    return text, before


def apply(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Write the study's params.yaml with these presets; yields one line per change. Nothing is written where the result is not in order."""
    text, before = with_presets(folder, names)
    path = folder / "params.yaml"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        try:
            check(temporary)
        except StageError as error:
            raise StageError(str(error).replace(str(temporary), f"{path} with {', '.join(names)}")) from None
    after = parse(text).data
    yield from changes(before.data, after) if after != before.data else ["nothing changes"]


def changes(before: Any, after: Any, keys: str = "") -> Iterator[str]:
    """``key: old → new`` for every value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from changes(before.get(key, ABSENT), after.get(key, ABSENT), f"{keys}.{key}" if keys else key)
    elif before != after:
        yield f"{keys}: {_short(before)} → {_short(after)}"


def _section(text: str, before: dict[str, Any], after: dict[str, Any], names: Sequence[str]) -> str:
    """One section's text: as it was, or written anew where its values changed."""
    name = text.split(":", 1)[0]
    if after[name] == before[name]:
        return text
    dumped = yaml.dump({name: after[name]}, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=140)
    return f"# With {', '.join(names)} (tools/preset.py):\n{dumped}\n"


def _means(text: str, data: dict[str, Any]) -> bool:
    """Whether ``text`` is read as ``data``."""
    try:
        return parse(text).data == data
    except StageError:  # an alias whose anchor was in a section that is written anew
        return False


def _short(value: Any) -> str:
    if value is ABSENT:
        return "(absent)"
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("\n...\n").strip()


def main(words: Sequence[str]) -> Iterator[str]:
    """The lines to print."""
    if not words or not (Path(words[0]) / "params.yaml").is_file():
        raise StageError("usage: python tools/preset.py FOLDER [PRESET ...], where FOLDER is a study such as pipelines/prc")
    folder, names = Path(words[0]), words[1:]
    yield from apply(folder, names) if names else presets(folder)


if __name__ == "__main__":
    try:
        for line in main(sys.argv[1:]):
            print(line)
    except StageError as error:
        sys.exit(str(error))
