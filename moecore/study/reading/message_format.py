"""The words of messages: values and keys as a file spells them, cut to what a screen shows."""

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

CONTROL_LETTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
LINE_LETTERS = 1_500  # letters of a line
MOST_LINES = 20
SHOWN_LETTERS = 60  # letters of a value
LONGEST_WORD = 255  # letters of a word that is looked for: nothing that is known is longer


def did_you_mean(word: Any, known: Sequence[Any]) -> str:
    """Return ``, did you mean 'x'?`` where a known word is close, else nothing."""
    if len(str(word)) > LONGEST_WORD:
        return ""
    close = get_close_matches(str(word), [str(name) for name in known], 1)
    return f", did you mean {close[0]!r}?" if close else ""


def shorten_to_one_line(text: str, most: int = LINE_LETTERS) -> str:
    """Return a text as one line of at most so many letters.

    Control characters are spelled; the middle is left out, as what is allowed stands at the end.
    """
    if len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return CONTROL_LETTERS.sub(lambda match: ascii(match[0])[1:-1], text)


def cap_line_count(lines: Sequence[str]) -> str:
    """Return the first lines, and how many more there are: nobody reads ten thousand."""
    more = len(lines) - MOST_LINES
    if more <= 1:
        return "\n".join(lines)
    path = re.sub(r":\d+:\d+: .*", "", lines[0])
    return "\n".join([*lines[:MOST_LINES], f"{path}: and {more:,} more; mend these first"])


def spell_keys(keys: Sequence[str | int]) -> str:
    """Return ``("a", 0, "b")`` as ``a[0].b``."""
    words = [
        f"[{key}]" if isinstance(key, int) else f".{shorten_to_one_line(str(key), SHOWN_LETTERS)}"
        for key in keys
    ]
    return "".join(words).lstrip(".") or "(the whole file)"


def show_value(value: Any) -> str:
    """Return a value with its type, as the file would spell it: ``'two' (str)``."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return shorten_to_one_line(f"the keys {', '.join(map(str, value))}", 300) if value else "{}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return f"{shorten_to_one_line(text, SHOWN_LETTERS)} ({type(value).__name__})"
