"""The hash of code: what changes it, what does not, and that all versions of Python agree."""

import ast

import pytest

from moecore.run.inputs import hash_syntax

CODE = '''\
"""A module."""
from typing import Literal

class Router:
    """Words."""

    k: int = 2

    def route(self, tokens, /, *, width: Literal["a"] = "a", **rest) -> str:
        """Return words."""
        match tokens:
            case [first, *_] if (count := len(rest)) > 1e400:
                return f"{first:>{width}}" f"" "tail" f"{count = :{''}}" rf"\\d{count!r}" "é"
            case {"x": -0.0} | None:
                pass
        return u"a" "b"
'''


def hash_code(text: str) -> str:
    return hash_syntax(ast.parse(text))


def test_every_python_makes_the_same_hash():
    """Python 3.12 and 3.13 have other trees than 3.11, of f-strings and of empty fields."""
    assert hash_code(CODE) == "95e1e296ee5840b7fc1125df87c4552d6d1ccb783a19221b75fcc49e37d47f22"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "# why\nx = (1)  # because"),
        ("x = 'ab'", 'x = (\n    "a"\n    u"b"\n)'),
        ("def f(a, b): return a", 'def f(\n    a,\n    b,\n):\n    """Words."""\n    return a'),
        ("class A: pass", 'class A:\n    """Words."""'),
        ("class A:\n    x: int", 'class A:\n    x: int\n    """What x is."""'),
        ("x = f'{y:{z}}'", 'x = f"" f"{ y :{z}}"'),
    ],
)
def test_words_and_layout_change_nothing(one, other):
    assert hash_code(one) == hash_code(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = ['', y]", "x = [y]"),
        ("x = [y, z]", "x = [[y], z]"),
        ("f(a, b)", "f(a, *b)"),
        ("f(a)", "f(a=a)"),
        ("x: int", "x: int = 0"),
        ("x = y.z", "x = z.y"),
        ("def f(a, b=1): f", "def f(a, *, b=1): f"),
        ("x = 'a', 'b'", "x = 'a' 'b'"),
        ("x = f'{y}'", "x = f'{y!r}'"),
        ("if x:\n    f()\n    g()", "if x:\n    f()\ng()"),
        ("x = '''a'''", "x = ''' a'''"),
    ],
)
def test_all_else_changes_it(one, other):
    assert hash_code(one) != hash_code(other)


METRIC = (
    'METRICS = {"imed": Metric("IMED, {}", "lower", note="a distance", paper="moge", over="t")}'
)


@pytest.mark.parametrize(
    ("old", "new"), [("IMED,", "IMED of"), ("a distance", "words"), (', paper="moge"', "")]
)
def test_words_of_a_metric_change_only_what_shows_them(old, new):
    edited = METRIC.replace(old, new)
    assert hash_code(edited) == hash_code(METRIC)
    trees = (ast.parse(text) for text in (edited, METRIC))
    assert len({hash_syntax(tree, shown=True) for tree in trees}) == 2
    others = (text.replace("Metric", "Other") for text in (edited, METRIC))
    assert len(set(map(hash_code, others))) == 2


@pytest.mark.parametrize(
    ("old", "new"), [('"imed"', '"other"'), ('"lower"', '"higher"'), ('over="t"', 'over="u"')]
)
def test_all_else_of_a_metric_changes_the_hash(old, new):
    assert hash_code(METRIC.replace(old, new)) != hash_code(METRIC)


def test_how_the_page_shows_a_measurement_changes_only_what_shows_it():
    page = 'page = OnPage("few shots", place=12)'
    assert hash_code(page) == hash_code(page.replace("12", "13"))
