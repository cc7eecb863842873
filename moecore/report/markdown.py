"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---"
) -> list[str]:
    """Return the lines of a table; rule: below the heads but the first, ``---:`` for numbers."""
    rules = ["---", *[rule] * (len(head) - 1)]
    return [f"| {' | '.join(map(_escape_cell, cells))} |" for cells in (head, rules, *rows)]


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
