"""Run five small pipelines and record what they computed, to compare it with that of other code.

    python -m tools.record_results before.json        # all of tools/equality.yaml
    python -m tools.record_results after.json quick   # one of them
    python -m tools.record_results --compare before.json after.json

Recorded are the sha256 of every trained model and every number of compare.json, except times and
memory. The first line of each document names a pipeline and its stages.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moecore.core.source_layout import ROOT
from moecore.pipeline.dvc_yaml import build_stage_entries, study_dvc_yaml_texts
from moecore.study.yaml_document import parse_yaml_document

FILE = Path(__file__).with_name("equality.yaml")
# Measured times, memory and what depends on them.
TIMED = re.compile(
    r"(_ms|_s|seconds|per_second|throughput|memory|_mb|overhead|routing_share|routing_batch_share)(_|$|\.)"
)
STARTED = "from moecore.pipeline.cli import app; app()"


def read_pipelines() -> dict[str, tuple[list[str], str]]:
    """Return name → stages and params.yaml of every pipeline."""
    pipelines = {}
    for text in FILE.read_text(encoding="utf-8").split("---\n"):
        name, _, stages = text.splitlines()[0].removeprefix("# ").partition(": ")
        pipelines[name] = (stages.split(), text)
    return pipelines


def record_pipeline(stages: list[str], text: str) -> dict[str, Any]:
    """Run a pipeline in a temporary folder; return hashes of weights, and numbers."""
    names = [stage for stage in stages if stage != "numbers"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "params.yaml").write_text(text, encoding="utf-8")
        run = parse_yaml_document(text).data["run"]
        for path, content in study_dvc_yaml_texts(build_stage_entries(names), run).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MOECORE_THREADS": "1"}
        for words in (
            ["git", "init", "--quiet"],
            ["dvc", "init", "--quiet"],
            [sys.executable, "-c", STARTED, "run", "--jobs", "2"],
        ):
            subprocess.run(words, cwd=folder, env=environment, check=True, stdout=sys.stderr)
        weights = {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted((folder / "artifacts").rglob("*.safetensors"))
            if file.parts[-1] != "items.safetensors"
        }
        compared = json.loads((folder / "reports/compare.json").read_text(encoding="utf-8"))
    numbers = {
        key: "measured time or memory" if TIMED.search(key) else value
        for key, value in flatten_values(compared)
        if not key.endswith("settings")
    }
    return {"weights": weights, "numbers": numbers}


def flatten_values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        path = f"{key}.{name}" if key else str(name)
        if isinstance(inner, (dict, list)):
            yield from flatten_values(inner, path)
        else:
            yield path, inner


def print_differences(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs between two records; return the number of differing values."""
    number = 0
    for name in sorted({*before, *after}):
        for kind in ("weights", "numbers"):
            ours, theirs = (side.get(name, {}).get(kind, {}) for side in (before, after))
            differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
            for key in differing[:20]:
                print(f"{name} {kind}: {key}: {ours.get(key)!r} → {theirs.get(key)!r}")
            print(f"{name} {kind}: {len(differing)} of {len({**ours, **theirs})} differ")
            number += len(differing)
    return number


def main(words: list[str]) -> int:
    """Record pipelines, or compare two records."""
    if words[0] == "--compare":
        before, after = (json.loads(Path(word).read_text(encoding="utf-8")) for word in words[1:3])
        return min(1, print_differences(before, after))
    target, *names = words
    pipelines = read_pipelines()
    recorded = {name: record_pipeline(*pipelines[name]) for name in names or pipelines}
    Path(target).write_text(json.dumps(recorded, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
