"""A hash of what Python code does: comments, docstrings and formatting do not change it.

``ast.dump`` would not do: what it prints differs between Python 3.11, 3.12 and 3.13.
"""

import ast
import hashlib
from collections.abc import Callable
from typing import Any

IGNORED_FIELDS = ("ctx", "kind", "type_comment")  # they follow from the rest, or have no effect


def hash_syntax(tree: ast.AST) -> str:
    """Return the sha256 of a syntax tree without what does nothing, alike on Python 3.11 to 3.13.

    What does nothing are statements that are mere strings, as docstrings are, and ``pass``.
    """
    words: list[str] = []
    _add_node(tree, words.append)
    return hashlib.sha256("".join(words).encode("ascii")).hexdigest()


def _add_node(node: Any, add: Callable[[str], None]) -> None:
    """Add the types of nodes, their fields where they hold something, and the constants."""
    if node.__class__ is list:
        add("[")
        for item in node:
            if not _does_nothing(item):
                _add_node(item, add)
        add("]")
    elif isinstance(node, ast.AST):
        add(node.__class__.__name__)
        add("(")
        if node.__class__ is ast.JoinedStr:  # Python 3.12 adds empty strings to some
            _add_node([part for part in node.values if getattr(part, "value", None) != ""], add)
            fields = ()
        else:
            fields = node._fields
        for name in fields:
            value = getattr(node, name, None)
            # later versions add fields without a value, and leave some out
            if value is not None and value != [] and name not in IGNORED_FIELDS:
                add(name)
                add("=")
                _add_node(value, add)
        add(")")
    else:
        add(ascii(node))
        add(",")


def _does_nothing(item: Any) -> bool:
    return item.__class__ is ast.Pass or (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    )
