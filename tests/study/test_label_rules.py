"""Settings without a meaning for volumes with ages are refused, with the line that says so."""

from pathlib import Path

import pytest
import yaml

from moecore.core.files import UserError
from moecore.study.checks import cross_checks
from moecore.study.document import parse
from moecore.study.foreseen import foresee
from moecore.study.params import validate_whole
from moecore.study.study import Study
from moecore.study.whole import check
from tests.project import ROOT, SHIPPED

FILE = ROOT / "pipelines/brain_age/params.yaml"
FLAT = {"kind": "digits", "size": 16}


def problems(edit, path: Path = FILE) -> list[str]:
    """The misfits of the study's params.yaml after ``edit`` changed its data."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    edit(data)
    document = parse(yaml.safe_dump(data, sort_keys=False), "params.yaml")
    return list(cross_checks(document, validate_whole(Study, document)))


def put(keys: str, value):
    """An edit that puts ``value`` at dotted keys; numbers are places of a list."""

    def edit(data):
        *way, last = [int(word) if word.isdigit() else word for word in keys.split(".")]
        for word in way:
            data = data[word]
        data[last] = value

    return edit


def test_the_study_itself_is_in_order():
    check(FILE)
    assert problems(lambda data: None) == []


@pytest.mark.parametrize(
    ("keys", "value", "where", "says"),
    [
        (
            "pretrain.label_smoothing",
            0.1,
            "pretrain.label_smoothing",
            "found 0.1, but these labels are real numbers (data.pretrain); allowed: 0",
        ),
        (
            "pretrain.mix",
            {"mixup": 0.8},
            "pretrain.mix",
            "are real numbers (data.pretrain); allowed: null",
        ),
        (
            "pretrain.views.crop",
            {"scale": [0.7, 1.0]},
            "pretrain.views.crop",
            "is for flat images; volumes have shift, flip, affine",
        ),
        ("pretrain.views.randaugment", {}, "pretrain.views.randaugment", "is for flat images"),
        (
            "pretrain.views.erasing",
            0.5,
            "pretrain.views.erasing",
            "found 0.5, which is for flat images",
        ),
        (
            "pretrain.views.affine",
            {"shear": 5},
            "pretrain.views.affine.shear",
            "found 5, which is for flat images; allowed for volumes: 0",
        ),
        ("routing.views.crop", {}, "routing.views.crop", "is for flat images"),
        (
            "routing.augmentations.1",
            "brightness",
            "routing.augmentations[1]",
            "found brightness, which is for flat images; allowed for volumes: identity, noise",
        ),
        (
            "routing.augmentations.1",
            {"name": "own", "views": {"size": 32}},
            "routing.augmentations[1].views.size",
            "found 32",
        ),
        (
            "methods.dense.distillation",
            0.5,
            "methods.dense.distillation",
            "a decision is a class (data.pretrain); allowed: 0",
        ),
        (
            "robustness.attacks.1",
            {"kind": "pgd", "objective": "dlr"},
            "robustness.attacks[1].objective",
            "found dlr, which needs classes; allowed: task",
        ),
        (
            "robustness.attacks.0",
            {"kind": "apgd", "objective": "cross_entropy"},
            "robustness.attacks[0].objective",
            "found cross_entropy",
        ),
        ("robustness.survivors", True, "robustness.survivors", "allowed: false"),
        (
            "calibrate.calibrator",
            {"kind": "temperature"},
            "calibrate.calibrator.kind",
            "found temperature, but the labels are real numbers; allowed: linear",
        ),
        (
            "data.pretrain",
            {"kind": "bids", "root": "x", "maps": None},
            "methods.ermoe.regions",
            "needs tissue maps, but maps and dseg of data.pretrain are null",
        ),
        (
            "teacher",
            {"kind": "timm", "name": "vit_tiny_patch16_224"},
            "teacher.kind",
            "found timm, whose models are of flat images; allowed for volumes: dense, no_teacher",
        ),
        (
            "model",
            {"kind": "vit"},
            "model.kind",
            "found vit, but the images of data.pretrain are volumes; allowed: vit3d",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(keys, value, where, says):
    found = [line for line in problems(put(keys, value)) if f": {where}: " in line]
    assert sum(says in line and line.startswith("params.yaml:") for line in found) == 1, problems(
        put(keys, value)
    )


def test_flat_images_with_classes_are_refused_where_ages_are_needed():
    found = "\n".join(problems(put("data.pretrain", FLAT)))
    assert (
        "run.thorough: data.pretrain has classes, and cohort_checks needs ages; "
        "allowed: kind: phantom or bids" in found
    )
    assert (
        "model.kind: found vit3d, but the images of data.pretrain are flat images; allowed: vit"
        in found
    )
    assert (
        "calibrate.calibrator.kind: found linear, but the labels are classes; allowed: temperature"
        in found
    )


def test_a_cohort_in_the_main_study_names_every_stage_that_measures_flat_images():
    def edit(data):
        data["data"]["pretrain"], data["model"] = {"kind": "phantom"}, {"kind": "vit3d"}

    found = "\n".join(problems(edit, SHIPPED))
    assert (
        "run.thorough: invariance, corruptions, stability, lipschitz "
        "measure flat images with classes, which data.pretrain has not" in found
    )
    assert (
        "run.phases[1]: data.pretrain and data.finetune are of two sorts, "
        "real numbers and classes; "
        "allowed: phases of one sort" in found
    )
    assert (
        "pretrain.views.crop" in found
        and "teacher.model.kind" in found
        and "finetune.shots" not in found
    )


def test_images_with_classes_are_left_alone():
    assert problems(lambda data: None, SHIPPED) == []


def test_the_check_as_a_whole_names_file_and_line(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "dvc.yaml").write_text(
        (FILE.parent / "dvc.yaml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    text = FILE.read_text(encoding="utf-8").replace(
        "{kind: linear, fit_on: train}", "{kind: temperature}"
    )
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    line = next(
        number for number, row in enumerate(text.splitlines(), 1) if "kind: temperature" in row
    )
    with pytest.raises(
        UserError, match=rf"params.yaml:{line}:\d+: calibrate.calibrator.kind: found temperature"
    ):
        check(folder / "params.yaml")


TEXT = """\
run: {methods: [smoe], seeds: [0], phases: [pretrain]}
data: {pretrain: {kind: docstrings, packages: [networkx]}}
model: {kind: language_model, width: 32, heads: 2, span: 16}
methods:
  smoe:
    router: {kind: top_k_softmax, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1, activation: relu, init: flat, dropout: 0.1}
    blocks: all
    pretrain: {learning_rate: 7.0e-4}
teacher: {kind: no_teacher}
pretrain: {epochs: 1, updates: 10, batch: 8, learning_rate: 0.001}
"""


def of_text(edit) -> list[str]:
    data = yaml.safe_load(TEXT)
    edit(data)
    document = parse(yaml.safe_dump(data, sort_keys=False), "params.yaml")
    return list(cross_checks(document, validate_whole(Study, document)))


def test_a_study_of_text_is_in_order():
    assert of_text(lambda data: None) == []


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        ("pretrain.views", {"shift": 1}, "but data.pretrain is text; leave it out"),
        ("pretrain.mix", {"mixup": 0.8}, "the labels are the words of a text (data.pretrain)"),
        ("pretrain.adversarial", {"steps": 1}, "but data.pretrain is text; leave it out"),
        (
            "methods.smoe.regularizers",
            [{"kind": "pairwise_consistency"}],
            "the method needs two views, and data.pretrain is text; take another method",
        ),
        ("methods.smoe.pretrain", {"rate": 1}, "pretrain.rate: Extra inputs are not permitted"),
        (
            "robustness",
            {"images": 8, "epsilons": [0.1], "attacks": [{"kind": "fgsm"}]},
            "data.pretrain is text, which this stage does not take; leave it out",
        ),
        (
            "calibrate",
            {"calibrator": {"kind": "linear"}},
            "found linear, but the labels are words; allowed: temperature",
        ),
    ],
)
def test_what_text_does_not_have_is_refused(keys, value, says):
    assert any(says in line for line in of_text(put(keys, value))), of_text(put(keys, value))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        ("model", {"kind": "vit"}, "but the images have 1 axes; allowed: language_model"),
        ("model.heads", 5, "model.heads: found 5; allowed: a divisor of model.width = 32"),
        ("data.pretrain.packages", ["nowhere"], "found nowhere, which is not installed"),
    ],
)
def test_models_and_data_of_text_are_looked_at_before_anything_runs(tmp_path, keys, value, says):
    data = yaml.safe_load(TEXT)
    put(keys, value)(data)
    file = tmp_path / "params.yaml"
    file.write_text(TEXT, encoding="utf-8")
    blocks = "blocks of 64 tokens, each read after 3 others"
    assert foresee(file).notes[0].startswith(f"data.pretrain: Docstrings; {blocks}")
    assert any(says in line for line in lines_of(tmp_path, data))


def lines_of(folder: Path, data: dict) -> list[str]:
    """What the check says of such a params.yaml."""
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    with pytest.raises(UserError) as refused:
        foresee(file)
    return str(refused.value).split("\n")


CAPTIONS = """\
run: {methods: [dense], seeds: [0], phases: [pretrain], measurements: [retrieval]}
data: {pretrain: {kind: captioned_mosaic, source: {kind: digits}}}
model: {kind: two_towers, image: {kind: vit, patch: 14, width: 32, depth: 4, heads: 2}}
methods: {dense: {}}
teacher: {kind: no_teacher}
pretrain: {epochs: 1, batch: 8, learning_rate: 0.001, views: {shift: 1}}
retrieval: {at: [1]}
"""


LIMITED = {"kind": "noisy_top_k", "k": 1, "capacity_factor": 1.0, "group_size": 1}
LOOKAHEADS = [
    ("router.kind", {"kind": "expert_choice"}),
    ("router.kind", {"kind": "soft_slots"}),
    ("router.kind", {"kind": "hash", "by": "patch"}),
    ("router.k", LIMITED | {"k": 2}),
    ("router.batch_priority", LIMITED | {"batch_priority": True}),
    ("router.group_size", {key: LIMITED[key] for key in ("kind", "k", "capacity_factor")}),
    ("router.router.k", {"kind": "frozen_copy", "router": LIMITED | {"k": 2}}),
]


@pytest.mark.parametrize(("study", "tower"), [(TEXT, ""), (CAPTIONS, "text.")])
def test_routers_that_look_ahead_are_refused_line_by_line(tmp_path, study, tower):
    data = yaml.safe_load(study)
    data["model"].get("image", {})["patch"] = 4
    experts = {"kind": "mlp", "number": 4, "hidden_ratio": 1}
    data["methods"] = {"causal": {}}
    for number, (_, router) in enumerate(LOOKAHEADS):
        part = {"router": router, "experts": experts, "blocks": "all"}
        data["methods"][f"m{number}"] = {"text": part} if tower else part
    data["run"]["methods"] = list(data["methods"])
    lines = lines_of(tmp_path, data)
    assert len(lines) == len(LOOKAHEADS)
    written = (tmp_path / "params.yaml").read_text(encoding="utf-8").split("\n")
    for number, (key, _) in enumerate(LOOKAHEADS):
        place, _, said = lines[number].partition(f": methods.m{number}.{tower}{key}: found ")
        file, line, _ = place.rsplit(":", 2)
        assert file.endswith("params.yaml") and "; allowed" in said
        word = "router" if key.endswith("group_size") else key.rpartition(".")[2]
        assert written[int(line) - 1].strip().startswith(word)


def of_captions(edit) -> list[str]:
    data = yaml.safe_load(CAPTIONS)
    edit(data)
    document = parse(yaml.safe_dump(data, sort_keys=False), "params.yaml")
    return list(cross_checks(document, validate_whole(Study, document)))


def test_a_study_of_captions_is_in_order():
    assert of_captions(lambda data: None) == []


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        ("pretrain.views", {"flip": True}, "captions of data.pretrain say left and right"),
        ("pretrain.mix", {"mixup": 0.8}, "a mixed image has no caption of its own"),
        ("pretrain.label_smoothing", 0.1, "captions are no classes"),
        (
            "model",
            {"kind": "vit"},
            "found vit, but data.pretrain has captions; allowed: two_towers",
        ),
        ("data.pretrain", {"kind": "digits"}, "data.pretrain has no captions, and retrieval looks"),
        ("methods.dense.distillation", 0.5, "captions are no classes"),
        ("run.measurements", ["few_shot"], "few_shot measure flat images with classes"),
        (
            "robustness",
            {"images": 8, "epsilons": [0.1], "attacks": [{"kind": "pgd", "objective": "dlr"}]},
            "dlr, which needs classes",
        ),
    ],
)
def test_what_captions_do_not_have_is_refused(keys, value, says):
    def edit(data):
        *path, last = keys.split(".")
        for key in path:
            data = data[key]
        data[last] = value

    assert any(says in line for line in of_captions(edit)), of_captions(edit)
