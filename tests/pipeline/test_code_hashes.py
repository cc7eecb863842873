"""Which files stand behind a stage, in a clone or a wheel; what changes a hash, in every Python."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.pipeline import code_hashes
from moecore.pipeline.code_hashes import (
    compute_code_hashes,
    import_closure,
    list_section_part_files,
)
from moecore.run.stage_inputs import hash_syntax
from moecore.study.yaml_document import parse_yaml_document
from tests.my_lab import SECTIONS, forget_package, write_my_lab
from tests.project import forget_files

TREE = {
    "moecore/__init__.py": '"""Only a docstring."""',
    "moecore/core/config.py": "",
    "moecore/data/helper.py": "from moecore.core import config\nimport moecore.run.record",
    "moecore/nn/layers/__init__.py": "WIDTH = 1",
    "moecore/nn/layers/block.py": "import moecore.core.config",
    "moecore/nn/routers/__init__.py": '"""A family."""',
    "moecore/nn/routers/base.py": "",
    "moecore/nn/routers/top.py": "from moecore.nn.routers import odds\nfrom .plan import Plan",
    "moecore/nn/routers/odds.py": "",
    "moecore/nn/routers/plan.py": "from moecore.data.helper import x",
    "moecore/nn/routers/other.py": "",
    "moecore/nn/experts/both.py": "",
    "moecore/training/regularizers/both.py": "",
    "moecore/data/atlas/map.bin": "",
    "moecore/data/tools/other.py": "",
    "moecore/run/record.py": "from moecore.core import written",
    "moecore/core/written.py": "",
    "moecore/report/html.py": "import moecore.core.config",
    "moecore/report/templates/page.html": "",
    "moecore/stages/train.py": "import torch\nfrom moecore.nn.routers.base import Router\n"
    "from moecore.nn.layers.block import Block\n\ndef f():\n    import moecore.data.helper",
    "moecore/stages/compare.py": "from moecore.report.html import page",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(files: set[Path]) -> set[str]:
    return {file.as_posix().removeprefix("moecore/") for file in files}


def test_closure_follows_modules_in_rooms_that_decide_and_parts_bring_helpers(tree):
    reached = names(import_closure("moecore/stages/train.py", tree))
    assert reached == {
        *"stages/train.py nn/layers/__init__.py nn/routers/base.py nn/layers/block.py".split(),
        *"core/config.py data/helper.py data/atlas/map.bin core/written.py".split(),
    }
    assert names(import_closure("moecore/stages/compare.py", tree)) == {"stages/compare.py"}
    rooms = (*code_hashes.DECIDING, "report")
    reached = names(import_closure("moecore/stages/compare.py", tree, rooms))
    files = "stages/compare.py report/html.py report/templates/page.html core/config.py"
    assert reached == set(files.split())
    section = {"router": {"kind": "top", "k": 2}, "experts": {"kind": "both"}}
    section["deep"] = [{"x": {"kind": "unknown"}}]
    assert names(list_section_part_files(section, tree)) == {
        *"nn/routers/top.py nn/routers/odds.py nn/routers/plan.py data/helper.py".split(),
        *"data/atlas/map.bin core/written.py core/config.py nn/experts/both.py".split(),
    }


def test_only_an_edit_of_a_used_part_changes_the_fingerprint(tree):
    def print_of() -> dict:
        forget_files()
        return code_hashes.hash_each_file(
            list_section_part_files({"router": {"kind": "top"}}, tree), tree
        )

    before = print_of()
    (tree / "moecore/nn/routers/new.py").write_text("x = 1")
    (tree / "moecore/nn/routers/other.py").write_text("x = 1")
    assert print_of() == before
    (tree / "moecore/nn/routers/plan.py").write_text("y = 2")
    assert print_of() != before


def test_broken_and_missing_files_are_named(tree):
    with pytest.raises(UserError, match=r"moecore/stages/none.py: no such file"):
        import_closure("moecore/stages/none.py", tree)
    (tree / "moecore/stages/bad.py").write_text("x = (")
    with pytest.raises(UserError, match=r"moecore/stages/bad.py:1: not valid Python"):
        import_closure("moecore/stages/bad.py", tree)


EVERY_PART = """\
run: {methods: [vmoe]}
data: {pretrain: {kind: digits}}
model: {kind: vit}
methods: {vmoe: {router: {kind: noisy_top_k}}, other: {router: {kind: hash}}}
calibrate: {calibrator: {kind: temperature}}
invariance: {images: 16}
corruptions: {attacks: [{kind: fgsm}]}
claims: []
questions: []
"""


MEASURED = ("corruptions", "invariance")


@pytest.fixture(scope="module")
def files() -> dict[str, dict[str, str]]:
    return compute_code_hashes(parse_yaml_document(EVERY_PART))


def test_there_is_a_file_for_whatever_a_stage_depends_on_with_the_parts_it_names(files):
    scripts = {f"stages/{file.name[:-3]}.json" for file in (ROOT / "stages").glob("[a-z]*.py")}
    assert {name for name in files if name.startswith("stages/")} == scripts
    others = {name.removesuffix(".json") for name in files if not name.startswith("stages/")}
    sections = {f"sections/{name}" for name in ("data.pretrain", "calibrate")}
    measured = {f"{kind}/{name}" for kind in ("sections", "measure") for name in MEASURED}
    assert others == {"methods/vmoe"} | sections | measured
    method, measurement = set(files["methods/vmoe.json"]), set(files["measure/corruptions.json"])
    assert {"moecore/nn/routers/noisy_top_k.py", "moecore/nn/backbones/vit.py"} <= method
    assert "moecore/nn/routers/hash.py" not in method
    assert {"moecore/measure/corruptions.py", "moecore/attacks/fgsm.py"} <= measurement
    assert "moecore/attacks/pgd.py" not in measurement


def test_stages_and_measurements_of_all_methods_reach_no_router_and_no_experts():
    """So an edit of such a part reruns only methods that name it; merging makes a folded router."""
    files = [*(ROOT / "moecore/stages").glob("[a-z]*.py"), *(ROOT / "moecore/measure").glob("*.py")]
    for file in files:
        for reached in import_closure(file.relative_to(ROOT)):
            if reached.parent.name in ("routers", "experts") and reached.stem != "folded":
                text = (ROOT / reached).read_text(encoding="utf-8")
                assert f'kind: Literal["{reached.stem}"]' not in text, f"{file}: {reached}"


def test_a_training_has_the_loop_and_the_optimizer_that_the_room_run_calls(files):
    for script in ("teacher", "pretrain", "finetune", "out_of_fold"):
        wanted = {"moecore/training/loop.py", "moecore/training/settings.py"}
        assert wanted <= set(files[f"stages/{script}.json"]), script


# Code from outside

PARAMS = f"""\
{SECTIONS}
run: {{methods: [mine], seeds: [0], phases: [pretrain], measurements: [my_lab.brightness]}}
data: {{pretrain: {{kind: digits}}}}
model: {{kind: vit}}
methods: {{mine: {{router: {{kind: my_lab.cosine}}, experts: {{kind: mlp}}}}}}
"""
RECORD = """\
my_lab/__init__.py,sha256=aa,0
my_lab/cosine.py,sha256=bb,1
my_lab/table.bin,sha256=cc,2
my_lab-0.3.dist-info/METADATA,sha256=dd,3
my_lab-0.3.dist-info/RECORD,,
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """Where Python finds my_lab, with two files that are no Python beside its modules."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    package = write_my_lab(tmp_path)
    (package / "table.bin").write_bytes(b"12")
    (package / "cache.nbi").write_bytes(b"3")
    forget_files()
    yield tmp_path
    forget_package()
    forget_files()


def hashes(name: str) -> dict[str, str]:
    forget_files()
    return compute_code_hashes(parse_yaml_document(PARAMS))[name]


def test_a_source_tree_is_hashed_by_its_files(folder):
    mine = hashes("methods/mine.json")
    assert mine["my_lab/table.bin"] == hashlib.sha256(b"12").hexdigest()
    assert {"my_lab/cosine.py", "my_lab/directions.py", "my_lab/cache.nbi"} <= set(mine)
    (folder / "my_lab/directions.py").write_text("cosines = None")
    changed = {name for name, one in hashes("methods/mine.json").items() if mine[name] != one}
    assert changed == {"my_lab/directions.py"}


def test_of_a_file_and_a_package_of_one_name_the_package_is_hashed(folder):
    package = folder / "my_lab/directions/__init__.py"
    package.parent.mkdir()
    (folder / "my_lab/directions.py").rename(package)
    (folder / "my_lab/directions.py").write_text("unit_rows = None")
    mine = hashes("methods/mine.json")
    assert "my_lab/directions/__init__.py" in mine and "my_lab/directions.py" not in mine


def test_an_installed_wheel_is_hashed_by_its_record(folder):
    """What a package writes into its folder while it runs is not in there."""
    about = folder / "my_lab-0.3.dist-info"
    about.mkdir()
    (about / "RECORD").write_text(RECORD)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_lab\nVersion: 0.3\n")
    mine = hashes("methods/mine.json")
    assert mine["my_lab/table.bin"] == "cc" and "my_lab/cache.nbi" not in mine


def test_measurements_pages_and_public_names_lead_to_where_they_live(folder):
    assert "my_lab/brightness.py" in hashes("measure/my_lab.brightness.json")
    assert "my_lab/pages/brightness.py" not in hashes("measure/my_lab.brightness.json")
    assert "my_lab/pages/brightness.py" in hashes("stages/compare.json")
    assert "my_lab/brightness.py" not in hashes("stages/measure.json")
    mine = hashes("methods/mine.json")
    assert "moecore/nn/routers/token_choice.py" in mine
    others = {"moecore/parts.py", "moecore/__init__.py", "moecore/training/regularizers/base.py"}
    assert not others & set(mine)


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("import moecore", {"metrics", "teacher", "router", "attack"}),
        ("from moecore import load_cv2", {"metrics"}),
        ("from moecore import parts", {"teacher"}),
        ("from moecore import routers", {"router"}),
        ("from moecore.routers import Hash", {"router"}),
        ("from moecore.routers import NoisyTopK", set()),
        ("from moecore.attacks import Fgsm", {"attack"}),
        ("from moecore.attacks import Pgd", set()),
        ("from moecore.measure import calibration", set()),
        ("from moecore.parts import Teacher", {"teacher"}),
    ],
)
def test_what_is_used_by_its_public_name_is_hashed(folder, line, used):
    (folder / "my_lab/directions.py").write_text(f"{line}\n")
    files = {"metrics": "moecore/measure/routing_metrics/layer_metrics.py"}
    files |= {"teacher": "moecore/training/teachers/base.py"}
    files |= {"router": "moecore/nn/routers/hash.py", "attack": "moecore/attacks/fgsm.py"}
    mine = hashes("methods/mine.json")
    assert {name for name, file in files.items() if file in mine} == used


# The hash of a file

ROUTER = '''\
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
    assert hash_code(ROUTER) == "95e1e296ee5840b7fc1125df87c4552d6d1ccb783a19221b75fcc49e37d47f22"


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
        *(("x = 1", "x = 1.0"), ("x = 1", "x = True"), ("x = ['', y]", "x = [y]")),
        *(("x = [y, z]", "x = [[y], z]"), ("f(a, b)", "f(a, *b)"), ("f(a)", "f(a=a)")),
        *(("x: int", "x: int = 0"), ("x = y.z", "x = z.y")),
        *(("def f(a, b=1): f", "def f(a, *, b=1): f"), ("x = 'a', 'b'", "x = 'a' 'b'")),
        *(("x = f'{y}'", "x = f'{y!r}'"), ("if x:\n    f()\n    g()", "if x:\n    f()\ng()")),
        ("x = '''a'''", "x = ''' a'''"),
    ],
)
def test_all_else_changes_it(one, other):
    assert hash_code(one) != hash_code(other)


METRIC = (
    'METRICS = {"imed": Metric("IMED, {}", "lower", note="a distance", paper="moge", over="t")}'
)


@pytest.mark.parametrize("call", ["Metric(", "parts.Metric("])
@pytest.mark.parametrize(
    ("old", "new"), [("IMED,", "IMED of"), ("a distance", "words"), (', paper="moge"', "")]
)
def test_words_of_a_metric_change_only_what_shows_them(old, new, call):
    text = METRIC.replace("Metric(", call)
    edited = text.replace(old, new)
    assert hash_code(edited) == hash_code(text)
    assert len({hash_syntax(ast.parse(code), shown=True) for code in (edited, text)}) == 2
    others = (code.replace("Metric", "Other") for code in (edited, text))
    assert len(set(map(hash_code, others))) == 2


@pytest.mark.parametrize(
    ("old", "new"), [('"imed"', '"other"'), ('"lower"', '"higher"'), ('over="t"', 'over="u"')]
)
def test_all_else_of_a_metric_changes_the_hash(old, new):
    assert hash_code(METRIC.replace(old, new)) != hash_code(METRIC)


def test_how_the_page_shows_a_measurement_changes_only_what_shows_it():
    page = 'page = OnPage("few shots", place=12)'
    edited = page.replace("12", "13")
    assert hash_code(page) == hash_code(edited)
    assert len({hash_syntax(ast.parse(code), shown=True) for code in (page, edited)}) == 2


@pytest.mark.parametrize("call", ["Field(", "pydantic.Field("])
def test_the_description_of_a_setting_changes_nothing_and_all_else_of_it_does(call):
    text = f'k: int = {call}2, ge=1, description="Experts per token.")'
    words = text.replace("per token", "of each token")
    assert hash_code(words) == hash_code(text) == hash_code(f"k: int = {call}2, ge=1)")
    others = (text.replace("ge=1", "ge=2"), text.replace("2,", "3,"), text.replace("k:", "n:"))
    assert hash_code(text) not in map(hash_code, others)
    assert hash_code(words.replace("Field", "Other")) != hash_code(text.replace("Field", "Other"))


REFUSAL = """
class Top(Router):
    k: int

    def misfits(self, around: Surroundings) -> Misfits:
        yield ("k",), f"found {self.k}; allowed: 1"

    def remarks(self) -> Misfits:
        yield ("k",), "few"
"""


@pytest.mark.parametrize(("old", "new"), [("allowed: 1", "allowed: one"), ('"few"', '"a few"')])
def test_words_of_a_refusal_change_nothing(old, new):
    assert hash_code(REFUSAL.replace(old, new)) == hash_code(REFUSAL)
    assert hash_code(REFUSAL[: REFUSAL.index("    def misfits")]) == hash_code(REFUSAL)
    assert hash_code(REFUSAL.replace("-> Misfits", "-> config.Misfits")) == hash_code(REFUSAL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-> Misfits", "-> Values"),
        ("misfits(", "route("),
        ("class Top(Router):\n    k: int\n", "if True:\n"),
        ("    def misfits", "    @cache\n    def misfits"),
    ],
)
def test_words_of_other_methods_change_the_hash(old, new):
    edited = REFUSAL.replace(old, new)
    assert hash_code(edited) != hash_code(REFUSAL)
    assert hash_code(edited.replace("allowed: 1", "allowed: one")) != hash_code(edited)


def test_a_package_that_is_not_installed_is_left_to_the_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = parse_yaml_document("packages: [nowhere_at_all]\ndata: 5\n")
    assert not code_hashes.is_code_up_to_date(code_hashes.digest_code_inputs(document), document)
