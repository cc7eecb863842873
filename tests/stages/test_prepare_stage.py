"""The stage ``prepare`` end to end on the digits: the folder, its history; a failure leaves the
old.
"""

import json

import pytest

from moecore.core.files import UserError
from moecore.data.contact import contact_sheet
from moecore.data.prepared import Prepared
from stages.prepare import prepare


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def test_prepare_writes_data_and_history(study):
    (study / "params.yaml").write_text(
        "data:\n  finetune: {kind: digits, size: 14, train_limit: 100}\n"
    )
    prepare("finetune")
    opened = Prepared.open("artifacts/data/finetune", verify=True)
    assert opened.train.images.shape == (100, 1, 14, 14)
    lines = [
        json.loads(line)
        for line in (study / "artifacts/history/prepare/finetune/history.jsonl")
        .read_text()
        .splitlines()
    ]
    assert any(line.get("dataset", {}).get("kind") == "digits" for line in lines)


def test_a_failure_leaves_what_was_there(study):
    (study / "params.yaml").write_text("data:\n  finetune: {kind: digits}\n")
    prepare("finetune")
    (study / "params.yaml").write_text("data:\n  finetune: {kind: image_folder, root: nowhere}\n")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        prepare("finetune")
    assert Prepared.open("artifacts/data/finetune").card["kind"] == "digits"


def test_unknown_names_and_kinds_are_named(study):
    (study / "params.yaml").write_text("data:\n  finetune: {kind: digit}\n")
    with pytest.raises(UserError, match="params.yaml:2"):
        prepare("finetune")
    with pytest.raises(UserError, match="data.pretrain: missing"):
        prepare("pretrain")


def test_contact_sheet_has_a_row_a_class(study):
    (study / "params.yaml").write_text("data:\n  finetune: {kind: digits}\n")
    prepare("finetune")
    axes = contact_sheet(Prepared.open("artifacts/data/finetune"), shots=3).axes
    assert len(axes) == 30 and [axis.get_ylabel() for axis in axes[::3]] == list("0123456789")
