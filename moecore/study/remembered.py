"""Whether params.yaml is in order, remembered.

Checking it anew imports every part, opens the data and builds the models: it takes seconds. This
imports none, so the answer takes milliseconds where neither file, code nor data changed.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moecore.core.files import write_json

ROOM = Path(__file__).resolve().parents[1]
MEMORY = ".state/checked.json"  # beside params.yaml
Also = Callable[[Any, Sequence[str]], Iterable[tuple[tuple, str]]]  # of a study and its stages


def in_order(
    path: str | Path = "params.yaml", home: Path | None = None, also: Also | None = None
) -> str:
    """``params.yaml: in order (…)`` and a line a data set, from memory where nothing changed.

    home: the folder in which the stages run; left out, that of the file. also: what rooms above
    this one have to say of a study with these stages: keys and what is wrong. Raises UserError with
    one line per problem.
    """
    memory = Path(path).parent / MEMORY
    key = _key(Path(path), Path(path).parent if home is None else home)
    kept = _recalled(memory)
    if kept.get("key") == key and _facts(kept["seen"]) == kept["seen"]:
        return f"{path}: {kept['says']}"
    from moecore.study.parts import check_parts  # imports torch

    check_parts()
    from moecore.study.foreseen import foresee  # made of the parts

    found = foresee(path, home, also)
    run = found.study.run
    trained = "nothing is trained"
    if run.methods:
        trained = f"{', '.join(run.methods)}; seeds {', '.join(map(str, run.seeds))}"
    head = f"in order ({trained})"
    says = "\n".join([head, *(f"  {note}" for note in found.notes)])
    seen = _facts(map(str, found.seen))
    with suppress(OSError):  # a file in place of the folder, or no right to write: not remembered
        write_json(memory, {"key": key, "seen": seen, "says": says})
    return f"{path}: {says}"


def _facts(paths: Iterable[str]) -> dict[str, list[int] | None]:
    """When each was last changed and how long it is; None for what is not there."""
    found: dict[str, list[int] | None] = {}
    for path in paths:
        try:
            facts = os.stat(path)
        except OSError:
            found[path] = None
        else:
            found[path] = [facts.st_mtime_ns, facts.st_size]
    return found


def _recalled(memory: Path) -> dict[str, Any]:
    """What is remembered; nothing where that is not as it was written: all is checked anew."""
    try:
        found = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kinds = {"key": str, "seen": dict, "says": str}
    if isinstance(found, dict) and all(isinstance(found.get(n), k) for n, k in kinds.items()):
        return found
    return {}


def _key(path: Path, home: Path) -> str:
    """The files' content, where the stages run, and which code and libraries read them."""
    digest = hashlib.sha256(f"{sys.version} {home.absolute()}".encode())
    for file in (path, path.with_name("dvc.yaml")):
        digest.update(file.read_bytes() if file.is_file() else b"absent")
    for line in (*_code(), *_libraries()):
        digest.update(line.encode())
    return digest.hexdigest()


def _code() -> Iterator[str]:
    for file in sorted(ROOM.rglob("*.py")):
        facts = file.stat()
        yield f"{file.relative_to(ROOM)} {facts.st_mtime_ns} {facts.st_size}\n"


def _libraries() -> Iterator[str]:
    for name in ("pydantic", "pydantic_core", "ruamel.yaml"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            yield f"{spec.origin} {Path(spec.origin).stat().st_mtime_ns}\n"
