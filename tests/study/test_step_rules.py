import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.source_layout import allow_packages
from moecore.report.tables.metrics_by_method import unanswerable_claims
from moecore.study import model_rules
from moecore.study.check import check_study
from moecore.study.study import Study, read_study
from moecore.study.trial_rules import outside_part_misfits, trial_step_misfits
from moecore.study.yaml_document import load_yaml_document
from tests import my_lab
from tests.my_lab import BRIGHTNESS, CALM, COSINE, SECTIONS, write_my_lab
from tests.project import SHIPPED

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
    my_lab.forget_package()


def with_all_methods(study: Study) -> Study:
    run = study.run.model_copy(update={"methods": tuple(study.methods)})
    return study.model_copy(update={"run": run})


def test_our_methods_and_parts_without_fault_make_a_step(folder):
    before = torch.get_rng_state()
    assert list(trial_step_misfits(with_all_methods(read_study(load_yaml_document(SHIPPED))))) == []
    assert torch.equal(before, torch.get_rng_state())
    write_my_lab(folder)
    assert check_study(also=unanswerable_claims).study.run.methods == ("mine",)


FAULTS = [
    ({"cosine": COSINE.replace(SOFTMAX, "logits.sigmoid()")}, ROUTER, "sum to 1"),
    ({"cosine": COSINE.replace("randn(experts", "randn(1 + experts")}, ROUTER, "IndexError"),
    ({"cosine": COSINE.replace(SOFTMAX, f"{SOFTMAX}.detach()")}, ROUTER, "gradient"),
    ({"cosine": COSINE.replace("= cosines", "= torch.rand(1) * cosines")}, ROUTER, "draw"),
    ({"calm": CALM.replace(".mean()", "")}, CALMING, "scalar"),
    ({"calm": CALM.replace("return ", "1 / 0\n        return ")}, CALMING, "my_lab/calm.py:15)"),
    ({"calm": CALM.replace(".square()", ".triangle()")}, CALMING, "my_lab/calm.py:15)"),
]


@pytest.mark.parametrize(("files", "place", "words"), FAULTS)
def test_a_faulty_part_is_named_in_a_line(folder, files, place, words):
    write_my_lab(folder, **files)
    with pytest.raises(UserError) as raised:
        check_study(also=unanswerable_claims)
    [line] = str(raised.value).split("\n")
    assert line.startswith(place) and words in line


FEW = """\
    def misfits(self, around):
        if around.experts.number > 3:
            yield ("k",), f"found {around.experts.number} experts; allowed: at most 3"

    def remarks(self):
        yield ("k",), "one expert is few"

    def build("""
NEEDY = """\
class Calm(Regularizer):
    needs = frozenset({"routing", "luck"})
"""
LUCKY = """\
    @property
    def provides(self):
        return frozenset({"luck"})

    def build("""


def test_what_parts_of_ones_own_say_has_its_place(folder):
    few, needy = (COSINE, "    def build(", FEW), (CALM, "class Calm(Regularizer):\n", NEEDY)
    cosine, calm = (text.replace(old, new) for text, old, new in (few, needy))
    write_my_lab(folder, cosine=cosine, calm=calm)
    with pytest.raises(UserError) as raised:
        check_study()
    first, second = str(raised.value).split("\n")
    assert first == ("params.yaml:9:35: methods.mine.router.k: found 4 experts; allowed: at most 3")
    assert second.startswith(f"{CALMING}which needs luck, but my_lab.cosine and mlp provide ")
    my_lab.forget_package()
    write_my_lab(folder, cosine=cosine.replace("    def build(", LUCKY), calm=calm)
    (folder / "params.yaml").write_text(PARAMS.replace("number: 4", "number: 3"))
    assert check_study().notes[1] == "methods.mine.router.k: one expert is few"


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
    with pytest.raises(UserError) as told:
        check_study()
    assert str(told.value).startswith(f"params.yaml:8:3: methods.mine: a small step fails: {words}")


def test_parts_of_a_text_tower_are_tried_too(folder):
    write_my_lab(folder, cosine=COSINE.replace(SOFTMAX, "logits.sigmoid()"))
    text = "    text: {router: {kind: my_lab.cosine, k: 1}, experts: {kind: mlp, number: 3}}\n"
    (folder / "params.yaml").write_text(PARAMS.replace("pretrain: {ep", f"{text}pretrain: {{ep"))
    study = read_study(load_yaml_document("params.yaml"))
    misfits = list(outside_part_misfits(study, {}, []))
    assert [keys[2:] for keys, _ in misfits] == [("router",), ("text", "router")]
    assert list(trial_step_misfits(study, [misfits[0][0]])) == []


CHILD = """\
import torch
from typing import ClassVar, Literal
from {module} import {parent}


class Own({parent}):
    kind: Literal["my_lab.own"] = "my_lab.own"
"""
SECTION = {  # of params.yaml, each with a part of a family that the others do not have
    "data": "data: {pretrain: {kind: my_lab.own, size: 16}}",
    "model": "model: {kind: my_lab.own, patch: 8, width: 32, depth: 4, heads: 2}",
    "teacher": "teacher: {kind: my_lab.own}",
    "calibrate": "calibrate: {calibrator: {kind: my_lab.own}}",
    "robustness": "robustness: {epsilons: [0.1], attacks: [{kind: my_lab.own}]}",
}
DIGITS = ("moecore.data.sources.digits", "Digits")
VIT = ("moecore.nn.backbones.vit", "Vit")
PLAN = "\n    def describe(self):\n        return super().describe()"
BUILT = """\
    def build(self, image, moe=None):
        model = super().build(image, moe)
        model.register_forward_hook(lambda model, given, out: out._replace({change}))
        return model
"""
OTHERS = [
    ("data", DIGITS, "", ""),
    ("data", DIGITS, f"{PLAN}._replace(counts={{'train': (1,)}})", "counts has train, validation"),
    ("data", DIGITS, f"{PLAN}.nothing", "my_lab/own.py:10)"),
    ("model", VIT, "", ""),
    ("model", VIT, BUILT.format(change="prediction=out.prediction * float('nan')"), "finite"),
    ("model", VIT, BUILT.format(change="prediction=out.prediction[1:]"), "(B, …, K)"),
    ("calibrate", ("moecore.measure.calibrators.temperature", "Temperature"), "", "kind"),
    ("robustness", ("moecore.attacks.fgsm", "Fgsm"), "", ""),
    (
        "robustness",
        ("moecore.attacks.fgsm", "Fgsm"),
        "    def perturb_images(self, at, ball, generator):\n        return ball.centre + 1\n",
        "no pixel moves",
    ),
]


@pytest.mark.parametrize(("section", "parent", "body", "words"), OTHERS)
def test_a_part_of_every_other_family_is_tried(folder, section, parent, body, words):
    write_my_lab(folder, own=CHILD.format(module=parent[0], parent=parent[1]) + body)
    key = SECTION[section].partition(":")[0]
    lines = [line for line in PARAMS.splitlines() if not line.startswith(key)]
    (folder / "params.yaml").write_text("\n".join([*lines, SECTION[section], ""]), encoding="utf-8")
    try:
        assert check_study().untried == () and not words
    except UserError as error:
        place, _, fault = str(error).partition(" found my_lab.own, which breaks ")
        assert place.split(":")[3].strip().startswith(section), str(error)
        assert words and words in fault and "\n" not in fault


CLASSED = """\
from typing import Literal
from moecore.tasks.classification import Classification


class Classed(Classification):
    kind: Literal["my_lab.classed"] = "my_lab.classed"

    def loss(self, *given, **named):
        return 2 * super().loss(*given, **named) if named else super().loss(*given)
"""
OF_CLASSED = """\
    task = Classed

    def describe(self):
        plan = super().describe()
        return plan._replace(task=Classed(classes=plan.classes))
"""
DEAF = """\
    def check_name(self, image):
        raise KeyError("name")
"""


def test_a_task_and_a_teacher_are_tried(folder):
    source = CHILD.format(module=DIGITS[0], parent=DIGITS[1])
    source = f"from my_lab.classed import Classed\n{source}{OF_CLASSED}"
    write_my_lab(folder, classed=CLASSED, own=source)
    text = PARAMS.replace("kind: digits", "kind: my_lab.own")
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"data.pretrain: found my_lab.classed, .*mean of the item"):
        check_study()
    my_lab.forget_package()
    teacher = CHILD.format(module="moecore.training.teachers.timm", parent="Timm")
    write_my_lab(folder, own=f"{teacher}{DEAF}")
    text = f"{PARAMS}teacher: {{kind: my_lab.own, name: vit}}\n"
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r": teacher: cannot be built: KeyError: 'name' \("):
        check_study()


def test_a_part_that_refuses_so_small_a_model_is_noted(folder):
    refusing = 'from moecore import UserError\n        raise UserError("width: found 8")'
    write_my_lab(folder, calm=CALM.replace("return ", f"{refusing}\n        return "))
    note = "my_lab.calm was not tried in small: width: found 8"
    assert check_study(also=unanswerable_claims).untried == (note,)


def test_a_measurement_is_held_to_its_promises_and_noted_where_it_fails_in_small(folder):
    drawing = BRIGHTNESS.replace("images = ", "import torch; torch.rand(1); images = ")
    write_my_lab(folder, brightness=drawing)
    with pytest.raises(UserError, match=r"^params.yaml:2:10: my_lab.brightness: .*no global"):
        check_study(also=unanswerable_claims)
    my_lab.forget_package()
    write_my_lab(folder, brightness=BRIGHTNESS.replace("subject.data.test", "subject.data.lost"))
    [note] = check_study(also=unanswerable_claims).untried
    assert note.startswith("my_lab.brightness was not tried in small: it fails on a small ViT")
    assert note.endswith("my_lab/brightness.py:14)")


def test_a_measurement_without_metrics_is_named(folder):
    typed = BRIGHTNESS.replace('metrics = {"brightness": Metric("Brightness")}', "")
    write_my_lab(folder, brightness=typed.replace("out.piece(", "return ("))
    line = r"^params.yaml:4:71: run.measurements\[0\]: found my_lab.brightness, .* since 0.4.0"
    with pytest.raises(UserError, match=line):
        check_study(also=unanswerable_claims)


def test_a_refused_reduction_without_a_key_is_at_its_method(monkeypatch):
    def refuse(*_):
        raise UserError("it keeps no expert")

    monkeypatch.setattr(model_rules, "build_phase_model", refuse)
    monkeypatch.setattr(model_rules, "planned_image_spec", lambda _: None)
    data = dict.fromkeys(("pretrain", "prune"), "the same")
    methods = {"vmoe": SimpleNamespace(moe="experts")}
    run = SimpleNamespace(methods=["vmoe"])
    study = SimpleNamespace(prune="half", merge=None, data=data, methods=methods, run=run)
    [(key, text)] = model_rules._reduction_problems(study, {"pretrain": None})
    assert (key, text) == (("methods", "vmoe"), "it keeps no expert (prune)")
