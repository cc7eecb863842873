"""A faulty part of a method is named before anything trains; ours have no fault."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages
from moecore.report.tables.comparison import unfit_metrics
from moecore.study.checking.preflight import check_study
from moecore.study.checking.step_rules import step_misfits
from moecore.study.reading.document import load_yaml
from moecore.study.reading.study import Study, read_study
from tests.my_lab import BRIGHTNESS_PAGE, CALM, COSINE, SECTIONS, forget_package, write_my_lab
from tests.project import ROOT, SHIPPED

PARAMS = f"""\
{SECTIONS}
run: {{methods: [mine], seeds: [0], phases: [pretrain], measurements: [my_lab.brightness]}}
data: {{pretrain: {{kind: digits, size: 16}}}}
model: {{kind: vit, patch: 8, width: 32, depth: 4, heads: 2}}
methods:
  mine:
    router: {{kind: my_lab.cosine, k: 1}}
    experts: {{kind: mlp, number: 4}}
    regularizers: [{{kind: my_lab.calm}}]
pretrain: {{epochs: 1, batch: 64, learning_rate: 0.001}}
"""
SOFTMAX = "torch.softmax(logits, dim=-1)"
ROUTER = "params.yaml:9:5: methods.mine.router: found my_lab.cosine, "
CALMING = "params.yaml:11:20: methods.mine.regularizers[0]: found my_lab.calm, "


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS, encoding="utf-8")
    yield tmp_path
    allow_packages((), ())
    forget_package()


def with_all_methods(study: Study) -> Study:
    run = study.run.model_copy(update={"methods": tuple(study.methods)})
    return study.model_copy(update={"run": run})


@pytest.mark.parametrize("file", [SHIPPED, *sorted(ROOT.glob("pipelines/*/params.yaml"))])
def test_our_methods_make_a_step(file):
    before = torch.get_rng_state()
    assert list(step_misfits(with_all_methods(read_study(load_yaml(file))), [])) == []
    assert torch.equal(before, torch.get_rng_state())


def test_parts_without_fault(folder):
    write_my_lab(folder)
    assert check_study(also=unfit_metrics).study.run.methods == ("mine",)


FAULTS = [
    ({"cosine": COSINE.replace(SOFTMAX, "logits.sigmoid()")}, ROUTER, "sum to 1"),
    ({"cosine": COSINE.replace("randn(experts", "randn(1 + experts")}, ROUTER, "IndexError"),
    ({"cosine": COSINE.replace(SOFTMAX, f"{SOFTMAX}.detach()")}, ROUTER, "gradient"),
    (
        {"cosine": COSINE.replace("logits = cosines", "logits = torch.rand(1) * cosines")},
        ROUTER,
        "draw",
    ),
    ({"calm": CALM.replace(".mean()", "")}, CALMING, "scalar"),
    ({"calm": CALM.replace("return ", "1 / 0\n        return ")}, CALMING, "my_lab/calm.py:15)"),
    ({"calm": CALM.replace(".square()", ".triangle()")}, CALMING, "my_lab/calm.py:15)"),
]


@pytest.mark.parametrize(("files", "place", "words"), FAULTS)
def test_a_faulty_part_is_named_in_a_line(folder, files, place, words):
    write_my_lab(folder, **files)
    with pytest.raises(UserError) as raised:
        check_study(also=unfit_metrics)
    [line] = str(raised.value).split("\n")
    assert line.startswith(place) and words in line


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("record.logits.mean() / (record.logits.shape[-1] != 3)", "the loss my_lab.calm is no"),
        (
            "(record.logits - record.logits[..., :1])[..., ::3].square().sum().sqrt()",
            "the gradient of cls_token",
        ),
    ],
)
def test_a_fault_of_no_part_alone_is_one_of_the_method(folder, term, words):
    write_my_lab(folder, calm=CALM.replace("record.logits.square().mean()", term))
    (folder / "params.yaml").write_text(PARAMS.replace("number: 4", "number: 3"))
    with pytest.raises(UserError) as raised:
        check_study()
    assert str(raised.value).startswith(
        f"params.yaml:8:3: methods.mine: a small step fails: {words}"
    )


def test_parts_of_a_text_tower_are_tried_too(folder):
    write_my_lab(folder, cosine=COSINE.replace(SOFTMAX, "logits.sigmoid()"))
    text = "    text: {router: {kind: my_lab.cosine, k: 1}, experts: {kind: mlp, number: 3}}\n"
    (folder / "params.yaml").write_text(PARAMS.replace("pretrain: {ep", f"{text}pretrain: {{ep"))
    misfits = step_misfits(read_study(load_yaml("params.yaml")), [])
    assert [keys[2:] for keys, _ in misfits] == [("router",), ("text", "router")]


def test_a_part_that_refuses_so_small_a_model_is_noted(folder):
    refusing = 'from moecore import UserError\n        raise UserError("width: found 8")'
    write_my_lab(folder, calm=CALM.replace("return ", f"{refusing}\n        return "))
    note = "my_lab.calm was not tried in small: width: found 8"
    assert note in check_study(also=unfit_metrics).notes


def test_a_measurement_that_the_report_would_drop_is_named(folder):
    page = BRIGHTNESS_PAGE.replace("SHOWN =", "HIDDEN =")
    write_my_lab(folder, **{"pages/brightness": page})
    with pytest.raises(UserError, match=r"^params.yaml:4:71: run.measurements\[0\]: found my_"):
        check_study(also=unfit_metrics)
