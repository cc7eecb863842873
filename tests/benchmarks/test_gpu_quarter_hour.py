"""The dry run of benchmarks/gpu_quarter_hour.sh, and the table that is written from its files."""

import math
import os
import subprocess
import sys

from benchmarks import table
from benchmarks.gpu import BOUNDS, DRY, relative_errors
from benchmarks.layers import prediction
from moecore.core.files import read_json, write_json
from moecore.pipeline import stage_client
from tests import forked
from tests.project import ROOT

# `python3 -m MODULE WORD…`, forked from a process that has imported torch
PYTHON = f"""\
#!/bin/sh
shift
code="import runpy, sys; sys.argv = '$*'.split(); runpy.run_module('$1', run_name='__main__')"
exec {sys.executable} -IS {forked.CLIENT} {sys.executable} python -m moecore.stages.script "$code"
"""


def test_a_dry_run_ends_with_finite_figures_of_every_part_and_the_table(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(PYTHON, encoding="utf-8")
    (tmp_path / "bin/python3").chmod(0o755)
    folders = map(str, (tmp_path / "bin", forked.server() / "bin", os.environ["PATH"]))
    env = os.environ | {"PATH": os.pathsep.join(folders)}
    env[stage_client.SOCKET_ENV] = str(forked.server() / "socket")
    command = [ROOT / "benchmarks/gpu_quarter_hour.sh", "--dry-run", tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {part: read_json(tmp_path / f"{part}.json") for part in table.GPU_PARTS}
    for part, result in results.items():
        figures = [row for row in result["rows"] if "skipped" not in row]
        numbers = [n for row in figures for n in row.values() if isinstance(n, float | int)]
        assert result["finished"] and all(map(math.isfinite, numbers)), part
        assert figures or part == "triton"  # which needs a card
        if part == "equality":
            assert all(row["value"] <= row["target"] for row in figures)
    text = (ROOT / table.README).read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    table.write_between_marks(tmp_path / "README.md", table.gpu_table(tmp_path))
    before, after = text.partition(table.BEGIN)[0], text.partition(table.END)[2]
    written = f"{before}{table.BEGIN}\n\n{table.gpu_table(tmp_path)}\n{table.END}{after}"
    assert (tmp_path / "README.md").read_text("utf-8") == written
    assert "≤ 1.3" in written and done.stdout.endswith(table.gpu_table(tmp_path))
    write_json(tmp_path / "layers.json", results["layers"] | {"finished": False})
    assert "Not measured: the rest of layers (it was stopped" in table.gpu_table(tmp_path)


def test_an_error_of_a_thousandth_is_seen():
    enlarge = lambda layer, *_: lambda tokens: 1.001 * prediction(layer(tokens))
    errors = relative_errors(enlarge, DRY, "float32", "cpu").values()
    assert min(errors) > 50 * BOUNDS["float32"]
