"""What constructors refuse, as a key of params.yaml and words."""

import re
import traceback
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.core.sources import FAMILIES, ROOT
from moecore.training.method import Method

REFUSED = (
    UserError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    LookupError,
    NameError,
    AssertionError,
)
KEYED = re.compile(r"((?:model|router|experts|blocks|finetune|regions)(?:\.\w+)*)(: | is )")


def placed(
    error: Exception, name: str, method: Method, phase: str, settings: Any
) -> tuple[tuple, str]:
    """Where in params.yaml to mend what a constructor of ``methods.<name>`` refused, and its words.

    phase, settings: of the training that builds it. An error that is no refusal is a mistake in a
    part, and named with its line; raised again where it does not come from a part.
    """
    if not isinstance(error, (UserError, ValueError)):
        return ("methods", name), mistake_in(error)
    key, text = stripped(error)
    if key[:1] == ("model",):
        own = key[1:] and key[1] in method.model
        where = ("methods", name, *key) if own else key
        return where, f"{text} (data.{phase})" if "image" in text else text
    asked = getattr(settings, "k", None)
    if key in (("finetune", "k"), ("router", "k"), ("router", "router", "k")) and asked is not None:
        return (phase, "k"), f"{text} (methods.{name})"
    return ("methods", name, *key), text


def stripped(error: Exception) -> tuple[tuple[str, ...], str]:
    """The keys with which a message begins, and the rest of it: ``found …; allowed: …``."""
    text = str(error)
    match = KEYED.match(text)
    if match is None:
        return (), text
    rest = text[match.end() :]
    if not rest.startswith("found "):
        rest = f"found {rest}"
    return tuple(match[1].split(".")), rest


def mistake_in(error: Exception) -> str:
    """``file:line: TypeError: …`` of the part that made it.

    Raises it again where no file of a family of parts took part.
    """
    families = [(ROOT / "moecore" / family).resolve() for family in (*FAMILIES, "measure")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.parent in families:
            place = f"{file.relative_to(ROOT)}:{frame.lineno}"
            return f"{place}: {type(error).__name__}: {error}"
    raise error
