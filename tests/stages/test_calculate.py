"""The stage ``calculate``: a package's measurement up to page and claim; what is refused."""

import sys

import pytest

from moecore.core.config import find_class
from moecore.core.files import UserError, read_json
from moecore.measure.base import Measurement
from moecore.pipeline.code_hashes import write_code
from moecore.pipeline.dvc import stage_definitions, study_dvc_yaml_texts
from moecore.report.tables.metrics_by_method import unfit_metric_problems
from moecore.stages.calculate import calculate
from moecore.stages.compare import compare
from moecore.study.check import check_document, check_study
from moecore.study.document import load_yaml_document, parse_yaml_document
from moecore.testing import check_calculation
from tests.my_lab import forget_package, write_my_lab

BOUND = '''\
from moecore.parts import Calculation, Chart, Metric, OnPage, Values

class Bound(Calculation):
    """Powers of two numbers."""
    metrics = {
        "power": Metric("Power {}", over="n"),
        "largest": Metric("Largest power", form="count"),
    }
    page = OnPage("powers", charts=(Chart("power", "n", "Powers", "n", "power"),))
    highest: int = 3

    def places(self):
        return {"n": range(1, self.highest + 1)}

    def calculate(self, out: Values) -> None:
        for n in self.places()["n"]:
            out.piece(f"{n}", lambda part: part.put("power", np.array([2.0, 3.0, 4.0]) ** n, n=n))
        out.put("largest", 4**self.highest)
'''.replace("from", "import numpy as np\nfrom", 1)
PICTURES = """\
from matplotlib.figure import Figure
from moecore.report.results import Pictures

PICTURES = Pictures("my_lab.bound", lambda found: [("a_curve", Figure())])
"""
PARAMS = """\
packages: [my_lab]
run: {methods: [], seeds: [], phases: [], calculations: [my_lab.bound]}
my_lab: {bound: {highest: 2}}
questions:
  - {asks: do squares grow, metric: power_2, against_metric: power_1, better: higher,
    method: my_lab.bound, against: my_lab.bound}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    write_my_lab(tmp_path, bound=BOUND, pictures=PICTURES)
    (tmp_path / "params.yaml").write_text(PARAMS)
    stages = stage_definitions(["calculate", "compare"])
    (tmp_path / "dvc.yaml").write_text(study_dvc_yaml_texts(stages, {})["dvc.yaml"])
    yield tmp_path
    forget_package()


def test_its_values_reach_the_page_and_answer_a_question(folder):
    check_study(also=unfit_metric_problems)
    write_code("params.yaml")
    hashed = read_json(folder / "artifacts/code/measure/my_lab.bound.json")
    assert "my_lab/bound.py" in hashed and "my_lab/pictures.py" not in hashed
    assert "my_lab/pictures.py" in read_json(folder / "artifacts/code/stages/compare.json")
    assert (folder / "artifacts/code/settings/my_lab.bound.json").is_file()
    calculate("my_lab.bound")
    assert (folder / "artifacts/history/my_lab.bound/history.jsonl").is_file()
    compare()
    compared = read_json(folder / "artifacts/compare.json")
    cells = compared["calculations"]["my_lab.bound"]
    means = {name: cell["mean"] for name, cell in cells.items()}
    assert means == pytest.approx({"power_1": 3, "power_2": 29 / 3, "largest": 16})
    (answer,) = compared["questions"].values()
    # n² − n = 2, 6, 12
    assert answer["difference"]["mean"] == pytest.approx(20 / 3)
    assert answer["difference"]["items"] == 3
    page = (folder / "reports/index.html").read_text(encoding="utf-8")
    assert 'id="my_lab_bound"' in page and "Largest power" in page and "Powers" in page
    assert (folder / "reports/plots/my_lab.bound_a_curve.svg").is_file()


def test_it_keeps_its_promises(folder):
    document = load_yaml_document("params.yaml")
    check_document(document, ("calculate", "compare"))
    check_calculation(find_class(Measurement, "my_lab.bound"))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("calculations: [my_lab.bound]", "calculations: [my_lab.brightness]", "has no settings"),
        ("calculations:", "measurements:", "found my_lab.bound; allowed: in run.calculations"),
        ("[my_lab.bound]", "[bound]", "found 'bound'; allowed: package.module of a listed"),
        ("power_2", "power_3", "found 'power_3', did you mean 'power_2'?; allowed in my_lab.bound"),
        ("against: my_lab.bound", "against: other", "found 'other'"),
        ("questions:", "sizes: {}\nquestions:", "a calculation since 0.3.0: write packages: "),
    ],
)
def test_what_is_wrong_is_named(folder, old, new, line):
    (folder / "params.yaml").write_text(PARAMS.replace(old, new, 1))
    with pytest.raises(UserError, match=line.replace("[", r"\[").replace("?", r"\?")):
        check_study(also=unfit_metric_problems)


def test_a_calculation_needs_its_stage(folder):
    with pytest.raises(UserError, match="run.calculations: found a list, but dvc.yaml has no sta"):
        check_document(parse_yaml_document(PARAMS, str(folder / "params.yaml")), ("compare",))
