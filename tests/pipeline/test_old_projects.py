"""Projects that earlier versions began, upgraded: their code is taken from git's history."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moecore.core.source_layout import ROOT
from moecore.pipeline.cli import app
from moecore.study.check import params_schema
from moecore.study.document import MOVED, load_yaml_document
from moecore.study.params_file import RENAMED_KEYS
from tests.my_lab import forget_package

OLD = {  # name → (commit, what its metadata said)
    "0.1.0": ("ac0663af", "0.1.0"),
    "25_november": ("7189a9c2", "0.2.0"),
    "0.2.0": ("0c36ca83", "0.2.0"),
}
FILES = ("moecore", "stages", "pipelines", "params.yaml", "dvc.yaml")


@pytest.fixture(scope="module", params=OLD)
def old(request, tmp_path_factory) -> Path:
    """A project that the code of this commit began, from ``quick``, with its schema."""
    commit, version = OLD[request.param]
    home = tmp_path_factory.mktemp("old")
    source = home / "source"
    archive = ["git", "archive", "-o", str(home / "source.tar"), commit, *FILES]
    if subprocess.run(archive, cwd=ROOT, capture_output=True).returncode:
        pytest.skip("git has no history here, or a part of it")
    source.mkdir()
    subprocess.run(["tar", "-xf", home / "source.tar", "-C", source], check=True)
    metadata = source / f"moecore-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: moecore\nVersion: {version}\n", "utf-8")
    command = [sys.executable, "-m", "moecore.pipeline.cli"]
    environment = os.environ | {"PYTHONPATH": str(source)}
    for words, folder in ((["new", "own"], home), (["schema"], home / "own")):
        done = subprocess.run([*command, *words], cwd=folder, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    return home / "own"


def test_an_upgraded_project_is_in_order_with_the_stages_that_it_had(old, monkeypatch):
    monkeypatch.chdir(old)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("moecore.pipeline.project_files.print_plan", lambda: None)
    stages = {*load_yaml_document(Path("dvc.yaml")).data["stages"]}
    forget_package("own")
    for words in (["upgrade", "--yes"], ["check"], ["study", "new", "mine"]):
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    forget_package("own")
    assert {*load_yaml_document(Path("dvc.yaml")).data["stages"]} == stages


def list_keys(
    schema: Mapping[str, Any], node: Any, above: tuple[str, ...] = (), used: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key that a schema knows; parts of a family share their paths."""
    if reference := node.get("$ref", "").removeprefix("#/$defs/"):
        if reference not in used:
            yield from list_keys(schema, schema["$defs"][reference], above, (*used, reference))
        return
    for entry in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from list_keys(schema, entry, above, used)
    for name, entry in node.get("properties", {}).items():
        yield (*above, name)
        yield from list_keys(schema, entry, (*above, name), used)
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from list_keys(schema, node[name], (*above, "*"), used)


def test_every_key_of_then_is_a_key_of_now_or_is_renamed(old):
    then, now = json.loads((old / "params.schema.json").read_text("utf-8")), params_schema()
    gone = {*list_keys(then, then)} - {*list_keys(now, now)}
    known = {step.key for step in RENAMED_KEYS}
    unknown = {".".join(path) for path in gone if path[0] not in MOVED} - known
    assert not unknown
    assert known <= {".".join(path) for path in gone}, "no key is in the list in vain"
