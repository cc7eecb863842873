"""Which files of a package from outside are hashed: of a source tree, and of a wheel."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.pipeline.code_hashes import hash_code_files
from moecore.study.document import parse_yaml_document
from tests.my_lab import SECTIONS, forget_package, write_my_lab
from tests.project import forget_files

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
    return hash_code_files(parse_yaml_document(PARAMS))[name]


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


def test_a_measurement_has_its_module_and_the_page_what_shows_it(folder):
    assert "my_lab/brightness.py" in hashes("measure/my_lab.brightness.json")
    assert "my_lab/pages/brightness.py" not in hashes("measure/my_lab.brightness.json")
    assert "my_lab/pages/brightness.py" in hashes("stages/compare.json")
    assert "my_lab/brightness.py" not in hashes("stages/measure.json")


def test_a_name_of_a_public_module_leads_to_the_file_where_it_lives(folder):
    mine = hashes("methods/mine.json")
    assert "moecore/nn/routers/token_choice.py" in mine
    others = {
        "moecore/parts.py",
        "moecore/face/__init__.py",
        "moecore/training/regularizers/base.py",
    }
    assert not others & set(mine)


@pytest.mark.parametrize(
    "line", ["import moecore", "from moecore import load_cv2", "from moecore import parts"]
)
def test_what_is_used_by_its_public_name_is_hashed(folder, line):
    (folder / "my_lab/directions.py").write_text(f"{line}\n")
    metrics = "moecore/measure/routing_metrics/layer_metrics.py"
    teacher = "moecore/training/teachers/base.py"
    mine = set(hashes("methods/mine.json"))
    assert (metrics in mine) == ("parts" not in line)
    assert (teacher in mine) == ("load_cv2" not in line)
    assert ("moecore/nn/routers/hash.py" in mine) == (line == "import moecore")
