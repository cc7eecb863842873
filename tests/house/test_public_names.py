"""The public names: page, ``__all__`` and docstrings agree, and an import loads nothing."""

import inspect
import json
import re
import subprocess
import sys

import pytest

import moecore
from moecore.core.source_layout import ROOT
from tools.public_names import render_public_names

SAID = "import sys, moecore; print(*dir(moecore)); print(*sys.modules)"


@pytest.mark.parametrize("name", moecore.__all__)
def test_a_public_name_is_there_and_has_a_docstring(name):
    value = getattr(moecore, name)
    parts = dir(value) if inspect.ismodule(value) else []
    for one in (value, *(getattr(value, part) for part in parts if part[:1].isupper())):
        assert isinstance(one, (str, bool)) or (inspect.getdoc(one) or "")[:1].isupper()


def test_a_family_offers_its_classes_by_name():
    from moecore.attacks import Pgd

    assert Pgd is moecore.attacks.Pgd and "Pgd" in dir(moecore.attacks)
    assert {"Router", "TopKSoftmax"} <= set(dir(moecore.routers))
    with pytest.raises(AttributeError, match=r"'moecore\.nn\.routers' has no attribute 'Chance'"):
        moecore.routers.Chance  # noqa: B018


def test_an_import_loads_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SAID], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names, modules = (line.split() for line in done.stdout.splitlines())
    assert names == moecore.__all__
    assert [name for name in modules if name.startswith("moecore")] == ["moecore"]
    assert not {"torch", "numpy", "pydantic"} & set(modules)


def test_other_names_are_no_attributes_and_renamed_ones_warn(monkeypatch):
    with pytest.raises(AttributeError, match="module 'moecore' has no attribute 'load_modl'"):
        moecore.load_modl  # noqa: B018
    monkeypatch.setitem(moecore.RENAMED, "load_modl", "load_model")
    with pytest.warns(DeprecationWarning, match=r"moecore\.load_modl is now moecore\.load_model"):
        assert moecore.load_modl is moecore.load_model
    code = (
        "from moecore.pages import Column; from moecore import parts; print(Column is parts.Column)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
    assert "DeprecationWarning: moecore.pages is now moecore.parts" in done.stderr


def test_the_page_is_what_the_code_says_and_names_what_a_part_may_define():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert page == render_public_names(), "run `python -m tools.public_names`"
    for row in ("sided: bool", "check_causal(key)", "needs: frozenset", "model_refusal(model)"):
        assert f"| `{row}" in page
    assert (
        "| `build(width)` | Return the experts for tokens of this width, d. **Required.** |" in page
    )


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
