"""Parts by kind: a file of ours, or a module of a package that a params.yaml lists."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moecore import parts
from moecore.core.config import find_class, list_own_names, part_classes_by_kind
from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages, more_packages
from moecore.core.source_layout import FAMILIES, ROOT
from moecore.study.document import parse_yaml_document
from moecore.study.study import Study, read_study
from moecore.training.method import Method
from tests.my_lab import COSINE, forget_package, write_my_lab

BASES = (
    *(parts.Attack, parts.Backbone, parts.Calibrator, parts.Experts, parts.Regularizer),
    *(parts.Router, parts.Source, parts.Task, parts.Teacher),
)
PARAMS = """\
packages: [my_lab]
run: {methods: [mine], seeds: [0]}
methods:
  mine:
    router: {kind: my_lab.cosine, k: 1}
    experts: {kind: mlp}
    regularizers: [{kind: my_lab.calm, weight: 0.5}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """Where Python finds packages; what was imported from there is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    forget_package()


def read(text: str = PARAMS) -> Study:
    return read_study(parse_yaml_document(text))


def refusal(text: str = PARAMS) -> str:
    """The one line that says what is wrong with the router."""
    with pytest.raises(UserError) as raised:
        read(text)
    [line] = [line for line in str(raised.value).split("\n") if "router" in line]
    return line


def test_every_family_is_a_folder_whose_parts_are_files():
    folders = {Path(inspect.getfile(base)).parent for base in BASES}
    assert folders == {ROOT / "moecore" / family for family in FAMILIES}
    assert "noisy_top_k" in list_own_names(parts.Router) and "capacity" not in list_own_names(
        parts.Router
    )
    for base in BASES:
        classes = part_classes_by_kind(base).values()
        assert not any(inspect.isabstract(part) for part in classes), base


def test_a_part_from_outside_is_read_written_and_used(folder):
    write_my_lab(folder)
    method = read().methods["mine"]
    assert type(method.router).__name__ == "Cosine" and method.regularizers[0].weight == 0.5
    written = method.model_dump(mode="json")
    assert written["router"] == {"kind": "my_lab.cosine", "k": 1, "temperature": 0.1}
    assert Method.model_validate(written) == method
    tokens, (record,) = method.moe.build(8)(torch.randn(2, 3, 8))
    assert tokens.shape == (2, 3, 8) and record.chosen.sum() == 6


def test_its_own_settings_are_checked_in_their_place(folder):
    write_my_lab(folder)
    line = refusal(PARAMS.replace("k: 1}", "k: 0}"))
    assert line.startswith("params.yaml:5:35: methods.mine.router.k: found 0")
    line = refusal(PARAMS.replace("k: 1}", "tempreature: 1}"))
    assert "did you mean 'temperature'?; allowed: kind, k, temperature" in line


def test_the_schema_has_the_parts_of_listed_packages(folder):
    write_my_lab(folder)
    read()
    schema = Study.model_json_schema()
    assert "my_lab__cosine__Cosine" in schema["$defs"]
    assert "#/$defs/Calm" in str(schema["$defs"]["Method"]["properties"]["regularizers"])
    allow_packages((), ())
    assert "my_lab__cosine__Cosine" not in Study.model_json_schema()["$defs"]


def test_a_faulty_module_that_nobody_names_is_in_nobodys_way_but_the_schemas(folder):
    write_my_lab(folder, later="class Later:\n    x = 1 / 0\n")
    assert "did you mean" in refusal(PARAMS.replace("k: 1}", "tempreature: 1}"))
    with pytest.raises(ValueError, match=r"my_lab.later cannot be imported: .*later.py:2\)$"):
        Study.model_json_schema()


FAULTS = [
    ({"cosine": "x = ("}, "SyntaxError: '(' was never closed", "my_lab/cosine.py:1)"),
    ({"cosine": "import my_lab.other"}, "No module named 'my_lab.other'", "my_lab/cosine.py:1)"),
    ({"directions": "\n1 / 0"}, "ZeroDivisionError: division by zero", "my_lab/directions.py:2)"),
    ({"cosine": "raise SystemExit(3)"}, "SystemExit: 3", "my_lab/cosine.py:1)"),
    ({"directions": "raise OSError('a\\nb')"}, "OSError: a b", "my_lab/directions.py:1)"),
    ({"cosine": "import torch\ntorch.nn.Linear(1, 'x')"}, "TypeError", "my_lab/cosine.py:2)"),
    ({"cosine/__init__": COSINE}, "my_lab has a file and a folder", "allowed: one"),
    ({"cosine": "x = 1"}, "my_lab/cosine.py", "has no class Cosine"),
    ({"cosine": f"{COSINE}\n\nclass Cosine(Router):\n    pass\n"}, "several classes Cosine", ""),
    ({"cosine": COSINE.replace('"my_lab.cosine"', '"hash"')}, "has the kind 'hash'", "allowed"),
    ({"cosine": COSINE.replace("Cosine(Router)", "Cosine")}, "Cosine of ", "is no Router"),
    ({"cosine": COSINE.replace("def build(", "def make(")}, "lacks what every Router has", "build"),
]


@pytest.mark.parametrize(("files", "words", "others"), FAULTS)
def test_a_faulty_part_is_named_in_a_line(folder, files, words, others):
    write_my_lab(folder, **files)
    line = refusal()
    assert line.startswith("params.yaml:5:5: methods.mine.router: ")
    assert words in line and others in line


def test_a_part_lacks_no_constant_of_its_family(folder):
    lacking = 'class Soft(Calibrator):\n    kind: Literal["my_lab.soft"] = "my_lab.soft"\n'
    imports = "from typing import Literal\nfrom moecore.parts import Calibrator\n"
    write_my_lab(folder, soft=imports + lacking)
    with (
        more_packages(["my_lab"]),
        pytest.raises(ValueError, match="has: fit, fitted, predicts, tasks$"),
    ):
        find_class(parts.Calibrator, "my_lab.soft")


def test_nothing_is_imported_that_is_not_listed(folder):
    write_my_lab(folder, __init__="raise AssertionError")
    line = refusal(PARAMS.replace("packages: [my_lab]\n", ""))
    assert "my_lab.cosine is of a package that is not listed; write packages: [my_lab]" in line
    assert "my_lab" not in sys.modules
    for kind in ("../cosine", "os.path", "my_lab", "base", "calm"):
        line = refusal(PARAMS.replace("kind: my_lab.cosine", f"kind: {kind}"))
        assert f"found kind: {kind}" in line or "not listed" in line


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("[nowhere]", "packages[0]: found nowhere, which is not installed; allowed: "),
        ("[my_lab, moecore]", "packages[1]: found moecore, whose parts have short kinds"),
        ("[os]", "packages[0]: found os; allowed: the name of an installed package"),
        ("[my_lab.cosine]", "packages[0]: found my_lab.cosine; allowed: "),
        ("my_lab", "packages: found 'my_lab' (str); allowed: "),
        ("[my_lab, my_lab]", "packages: found my_lab twice; allowed: "),
    ],
)
def test_what_no_package_is(folder, listed, words):
    write_my_lab(folder)
    with pytest.raises(UserError) as raised:
        read(PARAMS.replace("[my_lab]", listed))
    assert [line for line in str(raised.value).split("\n") if words in line], raised.value


def test_a_package_may_lie_beside_params_yaml_or_in_its_src(tmp_path, folder):
    write_my_lab(tmp_path / "project/src")
    (tmp_path / "project/params.yaml").write_text(PARAMS, encoding="utf-8")
    text = parse_yaml_document(PARAMS, str(tmp_path / "project/params.yaml"))
    assert read_study(text).methods["mine"].router is not None
