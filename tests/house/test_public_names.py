"""The public names: page, ``__all__`` and docstrings agree, and an import loads nothing."""

import inspect
import json
import re
import subprocess
import sys

import pytest

import moecore
from moecore import face
from moecore.core.source_layout import ROOT
from moecore.face.family_parts import FamilyParts

SAID = "import sys, moecore; print(*dir(moecore)); print(*sys.modules)"


@pytest.mark.parametrize("name", moecore.__all__)
def test_a_public_name_is_there_and_has_a_docstring(name):
    value = getattr(moecore, name)
    parts = dir(value) if isinstance(value, FamilyParts) else []
    for one in (value, *(getattr(value, part) for part in parts)):
        assert isinstance(one, str) or (inspect.getdoc(one) or "")[:1].isupper()


def test_the_face_imports_what_is_listed_and_nothing_else():
    imported = {name for name in vars(face) if not name.startswith("_")} - {"family_parts"}
    assert sorted([*imported, "__version__"]) == moecore.__all__ == sorted(moecore.__all__)


def test_an_import_loads_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SAID], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names, modules = (line.split() for line in done.stdout.splitlines())
    assert names == moecore.__all__
    assert [name for name in modules if name.startswith("moecore")] == ["moecore"]
    assert not {"torch", "numpy", "pydantic"} & set(modules)


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'moecore' has no attribute 'load_modl'"):
        moecore.load_modl  # noqa: B018


def test_a_renamed_name_warns_and_leads_to_the_new_one(monkeypatch):
    monkeypatch.setitem(moecore.RENAMED, "load_modl", "load_model")
    with pytest.warns(DeprecationWarning, match=r"moecore\.load_modl is now moecore\.load_model"):
        assert moecore.load_modl is moecore.load_model


def test_type_checkers_read_its_types():
    assert (ROOT / "moecore/py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def shown_code() -> dict[str, str]:
    """Return the Python that README, tutorials and notebook show, by file."""
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")}
    texts[ROOT / "README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    code = {
        str(file): "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for file, text in texts.items()
    }
    notebook = json.loads((ROOT / "docs/first_steps.ipynb").read_text(encoding="utf-8"))
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return code | {"first_steps.ipynb": "\n".join("".join(cell) for cell in cells)}


def test_what_is_shown_uses_public_names_only():
    for file, code in shown_code().items():
        used = re.findall(r"\bmoecore\.(\w+)", code)
        used += re.findall(r"^from moecore import (.+)", code, re.MULTILINE)
        names = {name.strip() for one in used for name in one.split(",")}
        assert names <= set(moecore.__all__), file
