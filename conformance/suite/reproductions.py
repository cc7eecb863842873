"""Scripts that show a failure without moecore, in at most 20 lines."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from moecore.conformance.targets import Target

MAX_LINES = 20  # with blank lines and comments
WIDTHS = (100, 150, 200)  # of a line of joined statements, the first that is enough


def read_setup(target: Target) -> str:
    """Return lines that define ``run`` and ``build``."""
    setup = "\n".join(map(read_source, (target.build, target.run)))
    options = getattr(target.run, "keywords", {})  # of a partial
    if options:
        setup += f"\nrun = functools.partial(run, **{options})"
    return setup


def read_source(function: Callable[..., Any]) -> str:
    """Return the source of a function, without docstring and blank lines."""
    inner = getattr(function, "func", function)  # of a partial
    source = textwrap.dedent(inspect.getsource(inner))
    text = source.replace(f'"""{inner.__doc__}"""', "")
    return "\n".join(line for line in text.splitlines() if line.strip())


def shorten_script(text: str) -> str:
    """Join neighbouring statements with semicolons until a script has MAX_LINES; "" if it cannot.

    A join that changes what the script does, as one into a comment would, is not made.
    """
    lines = text.strip().splitlines()
    program = ast.dump(ast.parse(text))
    for width in WIDTHS:
        place = 0
        while len(lines) > MAX_LINES and place + 1 < len(lines):
            joined = f"{lines[place]}; {lines[place + 1].strip()}"
            shorter = [*lines[:place], joined, *lines[place + 2 :]]
            if len(joined) <= width and has_program("\n".join(shorter), program):
                lines = shorter
            else:
                place += 1
    return "\n".join(lines) + "\n" if len(lines) <= MAX_LINES else ""


def has_program(text: str, program: str) -> bool:
    """Return whether a text is the program with this syntax tree."""
    try:
        return ast.dump(ast.parse(text)) == program
    except SyntaxError:
        return False
