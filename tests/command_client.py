"""``python -IS command_client.py PYTHON NAME WORD…``: a command, forked by command_server.py."""

# What is neither stage nor DVC is run by PYTHON.

import json
import os
import sys

sys.path.append(f"{os.path.dirname(os.path.dirname(__file__))}/moecore/pipeline")

from stage_client import run_on_server

python, name, *words = sys.argv[1:]
if words[:2] == ["-m", "moecore.pipeline.project_record"]:  # of `moecore run`
    name, words = "dvc", words[2:]
if name == "dvc":
    words = ["-m", "moecore.stages.command", json.dumps(["dvc", *words])]
sys.exit(run_on_server(python, words))
