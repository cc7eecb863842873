"""`moecore pilot`: its verdicts follow from its numbers, and it never looks at a test image."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from moecore.core.files import file_checksum, read_json, write_sealed
from moecore.data.prepared import Prepared
from moecore.data.sources.dialects import Dialects
from moecore.pipeline.cli import app
from moecore.pipeline.pilot import (
    PilotResult,
    PilotRow,
    fit_linear_router,
    pilot_score_for_task,
    pilot_verdicts,
)
from moecore.tasks.classification import Classification
from moecore.tasks.next_token import NextToken

STUDY = yaml.safe_load("""\
run: {methods: [dense, told], seeds: [0], phases: [pretrain]}
data:
  pretrain:
    {kind: dialects, source: {kind: digits}, dialects: 2, train: 400, validation: 100, test: 60}
model: {kind: single_layer, hidden: 4}
methods:
  dense: {}
  told:
    router: {kind: told}
    experts: {kind: mlp, number: 2, hidden_ratio: 0.0625}
    blocks: [0]
pretrain: {epochs: 2, batch: 50, learning_rate: 0.01, warmup_epochs: 0.1}
""")
ACCURACY = Classification(classes=("a", "b")).score


@pytest.fixture
def study(tmp_path):
    (tmp_path / "params.yaml").write_text(json.dumps(STUDY), encoding="utf-8")
    return tmp_path


def run_pilot_command(*words: object):
    return CliRunner().invoke(app, ["pilot", *map(str, words)], catch_exceptions=False)


def result_of(score, dense, told, learned, seconds: float = 60.0) -> PilotResult:
    scores = (dense, told, learned, told)
    rows = [PilotRow(str(at), one, [1.0, seconds]) for at, one in enumerate(scores)]
    return PilotResult(score, *rows, fitted=1.0)


def test_verdicts_by_hand():
    """Variances 0.0002, 0.0002, 0.0018 and 0.0002: their mean's root is 0.0245, 2.45 points."""
    result = result_of(ACCURACY, [0.48, 0.50], [0.59, 0.61], [0.545, 0.605])
    assert result.told_ahead_of(result.learned) == pytest.approx(2.5)
    assert [one.holds for one in pilot_verdicts(result)] == [True, True, True]
    worse = result_of(ACCURACY, [0.50, 0.52], [0.59, 0.61], [0.547, 0.607], 60.1)
    assert [one.holds for one in pilot_verdicts(worse)] == [False, False, False]


def test_perplexity_is_compared_in_percent_of_dense():
    """89 of 100 is 11 % better; variances 2 of each, so a scatter of √2 %."""
    score = pilot_score_for_task(NextToken(words=5))
    result = result_of(score, [99.0, 101.0], [88.0, 90.0], [89.4, 91.4])
    assert result.told_ahead_of(result.dense) == pytest.approx(11)
    assert [one.holds for one in pilot_verdicts(result)] == [True, False, True]
    assert pilot_verdicts(result_of(score, [99.0, 101.0], [88.0, 90.0], [89.5, 91.5]))[1].holds


def test_a_linear_rule_is_fitted():
    torch.manual_seed(0)
    tokens = torch.randn(500, 6)
    chosen = (tokens @ torch.randn(3, 6).T).argmax(dim=-1)
    fitted = (tokens @ fit_linear_router(tokens, chosen, 3).T).argmax(dim=-1)
    assert (fitted == chosen).float().mean() > 0.98


def test_a_small_study_and_its_test_images_that_nobody_reads(study, monkeypatch):
    """The second time on prepared data with other test images: all scores stay."""
    first = run_pilot_command(study, "--seeds", 2)
    assert [path.name for path in study.iterdir()] == ["params.yaml"], "it left something"
    verdicts = re.findall(r"^(yes|no) ", first.stdout, re.MULTILINE)
    assert len(verdicts) == 3 and first.exit_code == int("no" in verdicts)
    folder = study / "artifacts/data/pretrain"
    Dialects.model_validate(STUDY["data"]["pretrain"]).write(folder)
    for name in ("test_images.npy", "test_labels.npy"):
        np.save(folder / name, np.zeros_like(np.load(folder / name)))
    card = read_json(folder / "card.json")
    card["files"] |= {name: file_checksum(folder / name) for name in card["files"]}
    write_sealed(folder / "card.json", card)
    assert not Prepared.open(folder).test.images.any()
    monkeypatch.setattr(Dialects, "write", None)
    second = run_pilot_command(study / "params.yaml", "--seeds", 2)
    scores = [re.findall(r"\d+\.\d\d", one.stdout) for one in (first, second)]
    assert scores[0] == scores[1] and len(scores[0]) > 12


@pytest.mark.parametrize("lacking", ["dense", "told"])
def test_without_a_floor_or_a_ceiling_nothing_is_trained(study, lacking):
    methods = {name: one for name, one in STUDY["methods"].items() if name != lacking}
    run = STUDY["run"] | {"methods": [*methods]}
    text = json.dumps(STUDY | {"run": run, "methods": methods})
    (study / "params.yaml").write_text(text, encoding="utf-8")
    said = run_pilot_command(study)
    assert said.exit_code == 1 and said.stderr.count("\n") == 1 and not said.stdout
    assert re.search(r"params.yaml:1:\d+: methods: found \w+; allowed", said.stderr)


def test_a_folder_without_params_is_named(tmp_path):
    said = run_pilot_command(tmp_path)
    assert said.exit_code == 1 and f"{tmp_path}/params.yaml" in said.stderr
