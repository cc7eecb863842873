"""The code of docs/tutorials runs as it stands there, each block by itself and within 15 lines."""

import re

import pytest

from moecore.core.source_layout import ROOT
from moecore.training.teachers.timm import define_missing_operators

PRINTED = {  # of each tutorial, the words of its blocks and how what they print begins
    "own_model": {"MoELayer": "torch.Size([1, 32, 8])", "timm": "[0."},
    "lens": {
        "transformers": "torch.Size([4, 16, 8])",
        "Gate": "torch.Size([1, 6, 4])",
        "write_trace": "torch.Size([24, 10, 4])",
        "layouts": "(7, 7)",
        "save_file": "6",
    },
}


def python_blocks(name: str) -> list[str]:
    text = (ROOT / f"docs/tutorials/{name}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


CASES = [
    (word, begins, code)
    for name, printed in PRINTED.items()
    for (word, begins), code in zip(printed.items(), python_blocks(name), strict=True)
]


@pytest.mark.parametrize(("word", "begins", "code"), CASES)
def test_an_example_runs_within_fifteen_lines(word, begins, code, capsys, tmp_path, monkeypatch):
    define_missing_operators()
    monkeypatch.chdir(tmp_path)
    if word == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert word in code
    assert len([line for line in code.splitlines() if line]) <= 15
    exec(compile(code, "tutorial.md", "exec"), {})
    assert capsys.readouterr().out.startswith(begins)
