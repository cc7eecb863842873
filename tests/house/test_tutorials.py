"""The code of docs/tutorials runs as it stands there, each block by itself and within 15 lines."""

import re

import pytest

from moecore.core.source_layout import ROOT
from moecore.training.teachers.torchvision_operators import define_missing_operators

TUTORIAL = (ROOT / "docs/tutorials/own_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
PRINTED = {"MoELayer": "torch.Size([1, 32, 8])", "timm": "[0."}


def test_both_examples_are_there():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize(("word", "code"), [*zip(PRINTED, BLOCKS, strict=True)])
def test_an_example_runs_within_fifteen_lines(word, code, capsys):
    define_missing_operators()
    assert word in code
    assert len([line for line in code.splitlines() if line]) <= 15
    exec(compile(code, "own_model.md", "exec"), {})
    assert capsys.readouterr().out.startswith(PRINTED[word])
