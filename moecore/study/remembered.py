"""Whether params.yaml is in order, remembered.

Checking it anew imports every part and takes seconds. This imports none, so the answer takes
milliseconds where neither the file nor the code changed.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from moecore.core.files import write_json

ROOM = Path(__file__).resolve().parents[1]
MEMORY = ".state/checked.json"  # beside params.yaml


def in_order(path: str | Path = "params.yaml") -> str:
    """``params.yaml: in order (…)``, from memory where nothing changed since it was checked.

    Raises UserError with one line per problem.
    """
    memory = Path(path).parent / MEMORY
    key = _key(Path(path))
    kept = _recalled(memory)
    if kept.get("key") == key:
        return f"{path}: {kept['says']}"
    from moecore.study.whole import check  # imports torch

    run = check(path).run
    seeds = ", ".join(map(str, run.seeds))
    says = f"in order ({', '.join(run.methods)}; seeds {seeds})"
    write_json(memory, {"key": key, "says": says})
    return f"{path}: {says}"


def _recalled(memory: Path) -> dict[str, str]:
    try:
        return json.loads(memory.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # nothing remembered: the file is checked anew
        return {}


def _key(path: Path) -> str:
    """The files' content, and which code and libraries read them."""
    digest = hashlib.sha256(sys.version.encode())
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
