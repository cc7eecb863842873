"""Experts in Triton: equal to a slow reference, and within the limits of three kinds of cards."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from moecore.core.files import UserError
from tests.project import ROOT

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install triton==3.7.1"
)


def run_module(name, *arguments, **variables):
    command = [sys.executable, "-W", "ignore", "-m", name, *arguments]
    environment = os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_in_the_interpreter_they_equal_a_slow_reference():
    # The interpreter must be chosen before triton is imported, so another process does it.
    results = json.loads(run_module("benchmarks.triton_cases", TRITON_INTERPRET="1"))
    layer, models = results.pop("layer"), results.pop("models")
    bounds = {"float32": 1e-6, "float16": 0.002, "bfloat16": 0.02}
    for name, result in results.items():
        assert max(result["errors"]) < bounds[result["dtype"]], name
        assert result["same"] and result["idle"] == 0, name  # bits; gradients of unused experts
    assert len(results) >= 14 and max(layer["errors"]) < 1e-6
    assert layer["compiled"] and layer["without"] and "\n" not in layer["refusal"]
    assert "allowed: MOECORE_KERNELS=torch" in layer["refusal"]
    for model in models.values():  # of two layers
        assert model["calls"] == 2 and max(model["errors"]) < 1e-5


@needs_triton
def test_compiled_for_three_kinds_of_cards_they_stay_within_limits():
    cases = ("vit_s", "vit_s_swiglu_fp32")
    text = run_module("benchmarks.triton_resources", "--case", *cases, TRITON_INTERPRET="0")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert {row[3] for row in rows} == {"8.0", "9.0", "10.0"} and len(rows) == 54
    assert all(row[5] == "0" and not row[-1] for row in rows)  # bytes of spilled registers


@needs_triton
def test_what_exceeds_a_limit_is_named():
    from benchmarks.triton_resources import Usage

    assert Usage(128, 0, 99 * 1024, 0).excess(80, warps=8, shared_limit=2**20) == ""
    assert "spills: 8 " in Usage(128, 8, 0, 0).excess(80, warps=8, shared_limit=2**20)
    assert "164 KiB" in Usage(128, 0, 164 * 1024, 0).excess(80, warps=8, shared_limit=2**20)
    assert "99 KiB" in Usage(128, 0, 99 * 1024, 0).excess(90, warps=8, shared_limit=2**16)
    assert "255 × 512" in Usage(255, 0, 0, 0).excess(90, warps=16, shared_limit=2**20)


@needs_triton
def test_a_file_chooses_the_tiling_of_a_card(tmp_path, monkeypatch):
    from moecore.nn.kernels.triton_experts import TILINGS, TILINGS_FILE_VARIABLE, read_tiling

    read_tiling.cache_clear()
    path = tmp_path / "tilings.json"
    monkeypatch.setenv(TILINGS_FILE_VARIABLE, str(path))
    assert read_tiling("first", "product", 2) == TILINGS[2][0]  # no file
    chosen = {"product 2": list(TILINGS[2][1]), "weights 4": [1, 2, 3, 4]}
    path.write_text(json.dumps({"second": chosen}), encoding="utf-8")
    assert read_tiling("second", "product", 2) == TILINGS[2][1]
    assert read_tiling("second", "weights", 2) == TILINGS[2][0]
    with pytest.raises(UserError, match=r"second: weights 4: found \[1, 2, 3, 4\]; allowed: \[64"):
        read_tiling("second", "weights", 4)
    read_tiling.cache_clear()
