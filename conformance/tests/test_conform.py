"""`moecore conform`: the tutorial's adapter, its failure without moecore, and bad input."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from moecore.core.files import read_json, write_json
from moecore.pipeline.cli import app
from tests.project import ROOT

TUTORIAL = (ROOT / "docs/tutorials/conform.md").read_text(encoding="utf-8")
(ADAPTER,) = re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)


@pytest.fixture
def conform(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text, *options):
        (tmp_path / "my_adapter.py").write_text(text, encoding="utf-8")
        return CliRunner().invoke(app, ["conform", "my_adapter.py", *options])

    return run


def test_the_tutorials_adapter_and_a_reproduction_without_moecore(conform, tmp_path):
    assert len(ADAPTER.splitlines()) <= 30
    result = conform(ADAPTER, "--json", "verdicts.json")
    assert result.exit_code == 1
    (failure,) = re.findall(r"^mine: .*", TUTORIAL, re.MULTILINE)
    assert failure in result.stdout
    verdicts = {each["law"]: each for each in read_json(tmp_path / "verdicts.json")[0]["verdicts"]}
    assert verdicts["agree over ranks"]["status"] == "holds"
    assert verdicts["append padding"]["status"] == "not promised"
    name = verdicts["sum load shares"]["reproduction"]
    script = tmp_path / "conformance/findings" / name
    lines = script.read_text("utf-8").splitlines()
    assert len(lines) <= 20 and not re.search("import.*moecore", "\n".join(lines))
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True)
    assert done.stdout == "loss with equal probabilities: 2.0 stated: 1.0\n"
    assert (
        "[FAILS](findings/mine--sum-load-shares.py)"
        in (tmp_path / "conformance/README.md").read_text()
    )
    results = tmp_path / "conformance/results.json"
    earlier = read_json(results)["mine"] | {"target": "other"}
    del earlier["runs"]  # which the first version did not write
    write_json(results, {"other": earlier})
    assert conform(ADAPTER.replace("even_loss=1.0", "even_loss=2.0")).exit_code == 0
    assert sorted(read_json(results)) == ["mine", "other"]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("weights=weights, ", "", "run: weights: found only output, logits, probs, loss; allowed"),
        ("output=output", "output=output[..., :4]", "run: output: found (4, 16, 4); allowed: a t"),
        ("import torch\n", "import torhc\n", "my_adapter.py: ModuleNotFoundError: No module named"),
        ("TARGETS =", "TARGET =", "my_adapter.py: found TARGETS, NoneType; allowed: a Target"),
        ("causal=True", "not_promised={'tie': 'x'}", "laws not run: not_promised: found tie; a"),
        ("width=12", "width=13", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_bad_input_is_one_line(conform, old, new, line):
    result = conform(ADAPTER.replace(old, new))
    assert line in result.output and "Traceback" not in result.output


def test_an_error_in_one_law_leaves_the_others_to_run(conform, tmp_path):
    text = ADAPTER.replace("experts=4,", "experts=4, networks='no_such_experts',")
    result = conform(text, "--json", "verdicts.json")
    assert "not run: networks: found no_such_experts; allowed: the experts' par" in result.stdout
    verdicts = {each["law"]: each for each in read_json(tmp_path / "verdicts.json")[0]["verdicts"]}
    others = {law for law, each in verdicts.items() if each["status"] == "not run"}
    assert others == {"permute experts", "count dispatched tokens", "reach the router"}
    assert verdicts["permute tokens"]["status"] == "holds"


def test_an_assertion_of_the_library_breaks_no_law(conform):
    text = ADAPTER.replace(
        "    probs = logits", "    assert False, 'needs a GPU'\n    probs = logits"
    )
    result = conform(text)
    assert "mine: " in result.stdout and "not run: ValueError: run: needs a GPU" in result.stdout
    assert "fails" not in result.stdout


def test_an_adapter_too_long_for_a_script_says_so(conform):
    steps = "".join(
        f"    tokens = tokens + 0 * {n}  # a comment ends the line\n" for n in range(20)
    )
    result = conform(ADAPTER.replace("    probs = logits", steps + "    probs = logits"))
    assert "found 2 (no script of at most 20 lines: the adapter is too long)" in result.stdout


def test_a_module_that_does_not_import_is_one_line():
    result = CliRunner().invoke(app, ["conform", "no_such_package.adapters:TARGETS"])
    assert result.exit_code == 1 and "no_such_package" in result.output
    assert "Traceback" not in result.output and len(result.output.strip().splitlines()) == 1


def test_an_unknown_target_names_what_is_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["conform", "vmoee"])
    assert result.exit_code == 1 and re.search("found vmoee; allowed: .*vmoe, ", result.output)
    known = CliRunner().invoke(app, ["conform", "vmoe"])
    assert known.exit_code == 0 and known.stdout.count("holds") >= 15
