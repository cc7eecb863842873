"""What parts refuse and what is wrong with them, as a key of params.yaml or a file, and words."""

import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from moecore.core.files import UserError
from moecore.core.sources import FAMILIES, ROOT

FOLDERS = tuple(ROOT / "moecore" / family for family in (*FAMILIES, "measure"))
MEASUREMENT = {  # what the file of a measurement has
    "Result": "class Result(Config)",
    "applies": "def applies(subject: Subject) -> str | None",
    "measure": "def measure(subject: Subject, settings: …, parts: Parts) -> Result",
}

REFUSED = (
    UserError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    LookupError,
    NameError,
    AssertionError,
    ArithmeticError,
)
KEYED = re.compile(r"((?:model|router|experts|blocks|finetune|regions)(?:\.\w+)*)(: | is )")


def mistake_in(error: Exception) -> str:
    """``file:line: TypeError: …`` of the part that made it, or what the part lacks.

    Raises the error again where no file of a family of parts took part: it is no part's mistake.
    """
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(Path(error.filename))}:{error.lineno}: {said}"
    if isinstance(error, AttributeError) and (owner := _part_of(error.obj)):
        allowed = MEASUREMENT.get(str(error.name), f"an attribute {error.name}")
        return f"{shown(owner)} lacks {error.name}; allowed: {allowed}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.parent in FOLDERS and file.name != "base.py":
            return f"{shown(file)}:{frame.lineno}: {said}"
    raise error


def shown(file: Path) -> Path:
    """A path as a message names it: below the root where it lies there."""
    return file.relative_to(ROOT) if file.is_relative_to(ROOT) else file


def file_of(part: Any) -> Path:
    """Where a class, a function or a module is written."""
    if isinstance(part, ModuleType):
        return Path(part.__file__ or "?")
    code = getattr(part, "__code__", None)
    if code is not None:
        return Path(code.co_filename)
    owner = part if isinstance(part, type) else type(part)
    return Path(getattr(sys.modules.get(owner.__module__), "__file__", None) or "?")


def _part_of(part: Any) -> Path | None:
    """The file of a family in which ``part`` is written; None where it is in none."""
    file = file_of(part)
    return file if file.parent in FOLDERS and file.name != "base.py" else None


def placed(
    error: Exception, name: str, method: Any, phase: str, settings: Any
) -> tuple[tuple, str]:
    """Where in params.yaml to mend what a constructor of ``methods.<name>`` refused, and its words.

    phase, settings: of the training that builds it. An error that is no refusal is a mistake in a
    part, and named with its line; it is raised again where it does not come from a part.
    """
    key, text = worded(error)
    if key[:1] == ("model",):
        own = key[1:] and key[1] in method.model
        where = ("methods", name, *key) if own else key
        return where, f"{text} (data.{phase})" if "image" in text else text
    asked = getattr(settings, "k", None)
    if key in (("finetune", "k"), ("router", "k"), ("router", "router", "k")) and asked is not None:
        return (phase, "k"), f"{text} (methods.{name})"
    return ("methods", name, *key), text


def worded(error: Exception) -> tuple[tuple[str, ...], str]:
    """The keys with which a refusal begins, and the rest of it: ``found …; allowed: …``."""
    if not isinstance(error, (UserError, ValueError)):
        return (), mistake_in(error)
    text = str(error)
    match = KEYED.match(text)
    if match is None:
        return (), text
    rest = text[match.end() :]
    if not rest.startswith("found "):
        rest = f"found {rest}"
    return tuple(match[1].split(".")), rest
