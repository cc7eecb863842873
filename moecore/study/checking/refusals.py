"""What constructors of models refuse, as a key of params.yaml and words."""

import re
import traceback
from pathlib import Path
from typing import Any

from moecore.core.files import UserError

# What building a model of odd numbers raises, torch's and Python's own errors among it
REFUSED = (
    UserError,
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AssertionError,
    ArithmeticError,
)
KEY_PREFIX = re.compile(
    r"((?:model|teacher|router|text|experts|blocks|finetune|regions)(?:\.\w+)*)(: | is )"
)


def locate_error(
    error: Exception, name: str, method: Any, phase: str, settings: Any
) -> tuple[tuple, str]:
    """Return where in params.yaml to mend what building ``methods.<name>`` refused, and its words.

    phase, settings: of the training that builds it.
    """
    key, text = split_key_and_message(error)
    if key[:1] == ("model",):
        own = key[1:] and key[1] in method.model
        where = ("methods", name, *key) if own else key
        return where, f"{text} (data.{phase})" if "image" in text else text
    asked = getattr(settings, "k", None)
    if key in (("finetune", "k"), ("router", "k"), ("router", "router", "k")) and asked is not None:
        return (phase, "k"), f"{text} (methods.{name})"
    return ("methods", name, *key), text


def split_key_and_message(error: Exception) -> tuple[tuple[str, ...], str]:
    """Return the keys with which a refusal begins, and the rest of it: ``found …; allowed: …``."""
    text = str(error)
    if not isinstance(error, (UserError, ValueError)):
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = next(iter(text.splitlines()), "")
        place = f"{Path(last.filename).name}:{last.lineno}"
        return (), f"cannot be built: {type(error).__name__}: {reason} ({place})"
    match = KEY_PREFIX.match(text)
    if match is None:
        return (), text
    rest = text[match.end() :]
    if not rest.startswith("found "):
        rest = f"found {rest}"
    return tuple(match[1].split(".")), rest
