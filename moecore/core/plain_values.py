"""Conversion of results to JSON and of texts to cells of spreadsheets."""

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def to_jsonable(value: Any) -> Any:
    """Return settings, arrays, tensors and paths as types of JSON; non-finite numbers are null."""
    if isinstance(value, BaseModel):
        return to_jsonable(value.model_dump(mode="json"))
    if hasattr(value, "_asdict"):
        return to_jsonable(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def spreadsheet_cell(value: Any) -> Any:
    """Return a cell for CSV; a text that would run as a formula gets a leading apostrophe."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf", value, re.IGNORECASE)
    return value if is_number else f"'{value}"
