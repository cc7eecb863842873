"""The file ``history.jsonl``: one JSON object a line, appended while a stage runs, readable after any kill.

The first line is the header. Then, in any order, lines with exactly one of ``values`` (with ``step``), ``summary``, ``tags``,
``dataset``, ``model``, ``file`` or ``resumed``; the last one has ``status``. Each has ``t``, seconds since 1970.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

NAME = "history.jsonl"


def read_lines(folder: str | Path) -> list[dict]:
    """The complete lines of a folder's history, oldest first; empty where there is none. A torn last line is left out."""
    try:
        text = (Path(folder) / NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return list(_whole(text))


def _whole(text: str) -> Iterator[dict]:
    for line in text.split("\n")[:-1]:
        try:
            yield json.loads(line)
        except ValueError:
            return  # torn by a power cut: what follows it is not trusted


def before(lines: list[dict], step: int) -> list[dict]:
    """The lines up to the first point whose step is at least ``step``: what a run that goes on from there keeps."""
    for index, line in enumerate(lines):
        if line.get("step", -1) >= step or "status" in line:
            return lines[:index]
    return lines


def seconds(lines: list[dict]) -> float:
    """Time spent, without the time between a kill and the resume."""
    total, begun, last = 0.0, None, 0.0
    for line in lines:
        if begun is None or "resumed" in line:
            total, begun = total + (last - begun if begun is not None else 0.0), line["t"]
        last = line["t"]
    return round(total + (last - begun if begun is not None else 0.0), 3)


def encode(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


def points(lines: list[dict]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(step, time, values) of every logged point; numbers that are not finite come back as such."""
    for line in lines:
        if "values" in line:
            yield line["step"], line["t"], {name: float(value) for name, value in line["values"].items()}


def number(value: Any) -> float | str:
    """A float as JSON has it: ``nan`` and ``inf`` as text."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def plain(value: Any) -> Any:
    """JSON's types: settings, arrays, tensors and paths become dicts, lists, numbers and text; not-finite numbers null."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; a list of mappings counts from 0, a list of plain values stays one value."""
    if isinstance(value, list) and any(isinstance(inner, (Mapping, list)) for inner in value):
        value = {str(index): inner for index, inner in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {name: leaf for key, inner in value.items() for name, leaf in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()}


def scalars(value: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings without their lists and texts: the numbers that a table of metrics can show."""
    kept = {name: scalars(inner) if isinstance(inner, Mapping) else inner for name, inner in value.items()}
    return {name: inner for name, inner in kept.items() if isinstance(inner, (int, float, dict)) and inner != {}}
