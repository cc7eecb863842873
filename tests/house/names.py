"""Count breaches of the naming rule (CONTRIBUTING.md); the list of exceptions only shrinks."""

# ``python -m tests.house.names > tests/house/names.txt`` writes that list anew.

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tests.project import syntax_trees

# functions that many files have because a contract of DESIGN calls them
CONTRACT = "figures measure applies phase_blocks main build prepare describe forward".split()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FRAGMENT = re.compile(r"(Of|The same|Those|With|Its|What|Whether|How|Where|Which|As|In|By)\b")


def list_exceptions(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return ``path:function: what breaks the rule``, sorted."""
    homes = defaultdict(set)
    for path, tree in trees.items():
        for name in public_functions(tree):
            homes[name].add(path)
    breaches = set()
    for path, tree in trees.items():
        for name in public_functions(tree):
            if "_" not in name:
                breaches.add(f"{path}:{name}: one word")
            if len(homes[name]) > 1:
                breaches.add(f"{path}:{name}: in several files")
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                breaches |= {f"{path}:{node.name}: {breach}" for breach in inner_breaches(node)}
    return sorted(breaches)


def public_functions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's public functions but those that a contract gives."""
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and node.name not in CONTRACT:
            if not node.name.startswith("_"):
                yield node.name


def inner_breaches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    given = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    if "found" in given | stored:
        yield "a name `found`"
    words = ast.get_docstring(function) or ""
    if FRAGMENT.match(words) and not function.name.startswith("_"):
        yield "a docstring that begins in mid-sentence"


if __name__ == "__main__":
    print("\n".join(list_exceptions(syntax_trees())))
