"""What is known before anything runs: the file, its data, its models; each seen mistake once.

Whatever is written into params.yaml, the check answers in words.
"""

import json
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.data.sources.digits import Digits
from moecore.study.foreseen import foresee
from moecore.study.remembered import in_order
from tests.data.making import image_classes
from tests.project import PARAMS, SHIPPED

FILE = SHIPPED
FASHION = "{kind: fashion_mnist, validation: 5000}"
DIGITS = "{kind: digits, size: 28}"


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with our params.yaml on data that every machine has, and dvc.yaml."""
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    text = FILE.read_text(encoding="utf-8").replace(FASHION, DIGITS, 1)
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def edit(project: Path, *replacements: tuple[str, str]) -> Path:
    path = project / "params.yaml"
    text = path.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text, f"{old!r} is not in params.yaml"
        text = text.replace(old, new, 1)
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        foresee(path)
    return str(caught.value).split("\n")


def test_ours_is_in_order_and_says_what_the_data_are(project):
    found = foresee(project / "params.yaml")
    assert found.notes == (
        "data.pretrain: Digits; images of 1×28×28; 1,294 train, 144 validation, 359 test; "
        "10 classes",
        "data.finetune: Digits; images of 1×42×42; 1,294 train, 144 validation, 359 test; "
        "10 classes",
    )
    assert {path.name for path in project.iterdir()} == {"params.yaml", "dvc.yaml"}


LAUGHS = "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}' if level else 'x'] * 9)}]\n"
    for level in range(9)
)
MERGES = "m0: &m0 {x: 1}\n" + "".join(
    f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 8)}], k{level}: 1}}\n"
    for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (LAUGHS, ":1:1: aliases repeat values until they are more than 100,000; allowed: fewer"),
        (MERGES, ":1:1: aliases repeat values until they are more than 100,000; allowed: fewer"),
        (f"a: {'[' * 100_000}{']' * 100_000}\n", ":1:67: nested more than 64 levels deep"),
        (f"a: {'9' * 5000}\n", f"not valid YAML: '{'9' * 40}' is not an integer"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("a: \0\n", "control characters are not allowed"),
    ],
)
def test_a_file_that_would_not_end_is_refused_at_once(project, before, said):
    path = project / "params.yaml"
    path.write_text(before + path.read_text(encoding="utf-8"), encoding="utf-8")
    (line,) = refused(path)
    assert said in line and str(path) in line


VIT = "model: {kind: vit, patch: 7, width: 96, depth: 4, heads: 3, mlp_ratio: 2}"
SWIN = "{kind: swin_v2, patch: 7, width: 24, depths: [2, 2], heads: [2, 4], window: 2}"
MODEL = TEACHER = (VIT, f"model: {SWIN}")  # each takes the place of the first that is left


def test_a_router_that_the_task_hardly_trains_is_said(project):
    one = ("router: {kind: noisy_top_k, k: 2}", "router: {kind: noisy_top_k, k: 1}")
    found = foresee(edit(project, MODEL, TEACHER, one))
    assert found.notes[-1].startswith("methods vmoe: one expert a token in a swin_v2")
    path = edit(project, *[("kind: swin_v2", "kind: swin_moe")] * 2)
    assert len(foresee(path).notes) == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("window: 2", "window: 0", "model.window"),
        ("heads: [2, 4]", "heads: [2]", "model: heads has 1 values and depths 2"),
        ("heads: [2, 4]", "heads: [5, 4]", "model: heads is 5 in stage 1, whose width is 24"),
        ("patch: 7", "patch: 5", "model.patch: found 5; allowed: a divisor of the image size 28"),
    ],
)
def test_a_swin_that_cannot_be_is_refused_with_its_line(project, old, new, said):
    lines = refused(edit(project, (VIT, f"model: {SWIN.replace(old, new)}")))
    assert any("params.yaml:" in line and said in line for line in lines), lines


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds: [0]", "seeds: [9223372036854775808]", "run.seeds[0]: found 9.22e+18"),
        (
            "learning_rate: ",
            "learning_rate: 1.0e+300 #",
            "learning_rate: found 1e+300; allowed: numbers up to 1e+100",
        ),
        ("epochs: ", "epochs: 1000000000000000000000 #", "epochs: found 1e+21"),
        ("depth: 4", "depth: 1000000000", "model.depth: found 1000000000"),
        ("width: 96", "width: 960000000", "model.width: found 960000000"),
        (
            "views: {shift: 2}",
            "views: {shift: 42}",
            "shift: found 42, but data.finetune has images",
        ),
        ("  dense: {}", f"  dense: {{}}\n  {'a' * 101}: {{}}", "found a name of 101 characters"),
    ],
)
def test_absurd_numbers_are_refused_with_their_line(project, old, new, said):
    lines = refused(edit(project, (old, new)))
    assert any("params.yaml:" in line and said in line for line in lines), lines


IMAGES = "kind: digits, size: 28"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("epochs: ", f"epochs: {10**200} #", "training.epochs: found 1e+200"),
        (IMAGES, f"{IMAGES}, validation: .inf", "data.pretrain.validation: found .inf"),
        (IMAGES, f"{IMAGES}, validation: 1.0e400", "data.pretrain.validation: found .inf"),
        ("epochs: ", "epochs: 1000000000000000 #", "training.epochs: found 1000000000000000"),
        ("  dense: {}", '  dense: {}\n  "a\\nb": {}', r"methods.a\nb: found the name 'a\nb'"),
        (IMAGES, 'kind: "fash\\nion"', r"data.pretrain: found kind: fash\nion"),
        (
            "  dense: {}",
            "  dense: {pretrain: {batch: 1000000000}}",
            "methods.dense.pretrain.batch: found 1000000000, but there are",
        ),
        (
            "  dense: {}",
            "  dense: {pretrain: {warmup_epochs: 99}}",
            "methods.dense.pretrain.warmup_epochs: found 99, but epochs is 2; allowed: 0 to 2",
        ),
    ],
)
def test_what_was_a_traceback_or_accepted_is_one_line(project, old, new, said):
    (line,) = refused(edit(project, (old, new)))
    assert line.startswith(f"{project}/params.yaml:") and said in line, line


@pytest.mark.parametrize("root", ["~nosuchuser/x", r"a\nb"])
def test_an_odd_root_is_a_folder_that_is_not_there(project, root):
    lines = refused(edit(project, (IMAGES, f'kind: image_folder, root: "{root}"')))
    assert f"data.pretrain.root: {root} and " in lines[0] or f"root: {root}: no such" in lines[0]
    assert all(line.startswith(f"{project}/params.yaml") for line in lines), lines


@pytest.mark.parametrize("found", ["null", "3", "text", "[a]"])
def test_a_dvc_yaml_without_stages_is_said(project, found):
    (project / "dvc.yaml").write_text(f"stages: {found}\n", encoding="utf-8")
    (line,) = refused(project / "params.yaml")
    assert "dvc.yaml:1:1: stages: found" in line and "allowed: stages by their names" in line


@pytest.mark.parametrize("found", ["[]", "3", "{}", '{"seen": null}', "[" * 100_000])
def test_a_damaged_memory_is_none(project, found):
    memory = project / ".state/checked.json"
    memory.parent.mkdir()
    memory.write_text(found, encoding="utf-8")
    assert "in order (" in in_order(project / "params.yaml")
    assert "in order (" in json.loads(memory.read_text(encoding="utf-8"))["says"]


def test_a_file_in_place_of_the_memorys_folder_is_no_mistake(project):
    (project / ".state").write_text("", encoding="utf-8")
    assert "in order (" in in_order(project / "params.yaml")


def test_ten_thousand_mistakes_are_twenty_lines_and_their_number(project):
    path = project / "params.yaml"
    more = "".join(f"u{number}: 1\n" for number in range(10_000))
    path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")
    lines = refused(path)
    assert len(lines) == 21 and lines[-1].endswith("and 9,980 more; mend these first")


def test_many_seeds_are_compared_at_once(project):
    seeds = ", ".join(map(str, range(20_000)))
    (line,) = refused(edit(project, ("seeds: [0]", f"seeds: [{seeds}, 7]")))
    assert "run.seeds[20000]: 7 is there twice; keep one" in line


def test_many_blocks_are_no_long_line(project):
    blocks = list(range(60_000))
    (line,) = refused(edit(project, ("  vmoe:\n", f"  vmoe:\n    blocks: {blocks}\n")))
    assert "methods.vmoe.blocks: found [0, 1" in line and "a model of 4 blocks" in line
    assert len(line) < 2000


def test_a_teacher_of_other_stages_is_refused(project):
    lines = refused(edit(project, MODEL))
    assert any("found a model of 1 stages; methods.tgr" in line for line in lines), lines


def test_teachers_that_nobody_needs_are_named(project):
    several = ("seeds: [0]", "seeds: [0, 1, 2]")
    assert len(foresee(edit(project, several)).notes) == 2, "tgr needs them"
    methods = ("methods: [dense, vmoe, prc, ermoe, tgr, moge]", "methods: [dense, vmoe]")
    said = foresee(edit(project, methods)).notes[-1]
    assert said.startswith("teacher: 3 are trained, one a seed, but no method of run.methods needs")
    assert len(foresee(edit(project, several[::-1])).notes) == 2, "one seed trains one, as ever"


def test_the_seed_of_a_teacher_is_that_of_the_run(project):
    path = edit(project, ("teacher_router: {steps", "teacher_router: {seed: 1, steps"))
    (said,) = refused(path)
    assert "teacher_router.seed" in said and "steps" in said


def test_fine_tuning_with_a_teacher_that_a_method_does_not_have(project):
    path = edit(project, ("  dense: {}", "  dense: {guided_finetuning: true}"))
    (said,) = refused(path)
    assert "methods.dense.guided_finetuning: nothing of the method needs a teacher" in said


SIZE = "width: 96, depth: 4, heads: 3, mlp_ratio: 2}\n\nmethods"
RATE = "  learning_rate: 1.5e-3\n  warmup_epochs: 0.3"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "{kind: digits, size: 42}",
            "{kind: digit, size: 42}",
            ": data.finetune: found kind: digit, did you mean 'digits'?; allowed: fashion_mnist, ",
        ),
        (
            "router: {kind: noisy_top_k, k: 2}",
            "router: {kind: noisy_top_k, k: 9}",
            "params.yaml:21:33: methods.vmoe.router.k: found 9, but there are 8 experts",
        ),
        (
            SIZE,
            SIZE.replace("heads: 3", "heads: 5"),
            ": model.heads: found 5; allowed: a divisor of model.width = 96",
        ),
        (
            SIZE,
            SIZE.replace("depth: 4", "depth: 2"),
            ": methods.vmoe.blocks: found last_2, but a model of 2 blocks has only 1 with an odd",
        ),
        (RATE, RATE.replace("1.5e-3", ".inf"), ": pretrain.learning_rate: found .inf; allowed: a"),
        (RATE, RATE.replace("1.5e-3", "-.inf"), ": pretrain.learning_rate: found -.inf; allowed"),
        (RATE, RATE.replace("1.5e-3", ".nan"), ": pretrain.learning_rate: found .nan; allowed: a"),
        (
            DIGITS,
            "{kind: cifar, download: true, size: 28}",
            ": data.finetune: its images have 1 channel, those of data.pretrain 3; allowed: as",
        ),
        (
            "{kind: digits, size: 42}",
            "{kind: digits, size: 30}",
            ": model.patch: found 7; allowed: a divisor of the image size 30 (data.finetune)",
        ),
        (
            "  batch: 25",
            "  batch: 401",
            ": finetune.batch: found 401, but there are 400 training images (40 shots of 10 "
            "classes); allowed: 1 to 400",
        ),
        (
            "  batch: 64",
            "  batch: 1295",
            ": pretrain.batch: found 1295, but there are 1294 training images (data.pretrain)",
        ),
        (
            "    batch: 128",
            "    batch: 1295",
            ": teacher.training.batch: found 1295, but there are 1294 training images",
        ),
        (
            "batch: 256",
            "batch: 1295",
            ": teacher_router.batch: found 1295, but there are 1294 training images",
        ),
        (
            "  shots: 40",
            "  shots: 400",
            ": finetune.shots: found 400, but class 8 of data.finetune has 125 training images",
        ),
        (
            "  warmup_epochs: 2\n",
            "  warmup_epochs: 20\n",
            ": finetune.warmup_epochs: found 20, but epochs is 14; allowed: 0 to 14",
        ),
        ("  shots: 40", "  k: 9", ": finetune.k: found 9, but there are 8 experts"),
        (
            "\n  dense: {}\n",
            "\n  dense: {model: {heads: 5}}\n",
            ": methods.dense.model.heads: found 5; allowed: a divisor of model.width = 96",
        ),
        (
            "teacher:\n  kind: dense\n  model: {kind: vit, patch: 7",
            "teacher:\n  kind: dense\n  model: {kind: vit, patch: 14",
            ": teacher.model: it sees 5 tokens of data.pretrain, and methods.tgr, which it guides,",
        ),
        (
            "teacher:\n  kind: dense\n  model: {kind: vit, patch: 7",
            "teacher:\n  kind: dense\n  model: {kind: vit, patch: 4",
            ": teacher.model.patch: found 4; allowed: a divisor of the image size 42 (data.finetun",
        ),
        (
            "\n  dense: {}\n",
            "\n  dense: {router: {kind: noisy_top_k}, experts: {kind: eigen}, upcycle: true}\n",
            ": methods.dense.upcycle: a dense MLP can be copied into experts of kind mlp only",
        ),
        (
            "{kind: digits, size: 42}",
            "{kind: digits, size: 42, validation: 1500}",
            ": data.finetune: cannot split 1500 images off 1438; allowed: 1 to 1437",
        ),
    ],
)
def test_what_was_seen_to_fail_later_is_said_first(project, old, new, expected):
    lines = refused(edit(project, (old, new)))
    assert any(expected in line for line in lines), "\n".join(lines)


def test_missing_data_are_named_and_the_rest_is_checked(project):
    root = "{kind: image_folder, root: flowers, size: 28, channels: 1}"
    lines = refused(edit(project, (DIGITS, root)))
    assert lines[0].startswith("params.yaml:11:34: data.pretrain.root: flowers") or (
        ":11:34: data.pretrain.root: flowers: no such folder; set `root`" in lines[0]
    )
    assert len(lines) == 2 and lines[1].endswith("params.yaml: all else is in order")
    lines = refused(edit(project, ("  batch: 25", "  batch: 401")))
    assert "no such folder" in lines[0] and "finetune.batch: found 401" in lines[1]


def test_what_is_wrong_in_the_file_comes_before_its_data_and_models(project):
    path = edit(
        project,
        (DIGITS, "{kind: image_folder, root: flowers, size: 30}"),
        ("  seeds: [0", "  seeds: [0, 0"),
    )
    lines = refused(path)
    assert "run.seeds[1]: 0 is there twice" in lines[0]
    assert "data.pretrain.root: " in lines[1]
    assert "data.finetune: its images have 1 channel" in lines[2] and len(lines) == 3


def test_a_download_is_said_and_no_mistake(project):
    cifar = "{kind: cifar, download: true, size: 28}"
    found = foresee(edit(project, (DIGITS, cifar), ("{kind: digits, size: 42}", cifar)))
    assert "prepare will download it into data/raw/cifar" in found.notes[0]


def test_paths_count_from_the_folder_of_the_study_and_from_the_repository(tmp_path, monkeypatch):
    study = tmp_path / "pipelines/mine"
    study.mkdir(parents=True)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    (study / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    text = PARAMS.replace(
        "pretrain: {kind: digits, size: 16}",
        "pretrain: {kind: image_folder, root: flowers, size: 16, channels: 1}",
    ).replace("batch: 64", "batch: 8")
    (study / "params.yaml").write_text(text, encoding="utf-8")
    image_classes(tmp_path / "flowers", {"aster": 20, "rose": 20})
    monkeypatch.chdir(study)
    assert "flowers: no such folder" in refused(Path("params.yaml"))[0]
    (study / ".dvc").mkdir()  # a DVC project within that of the repository
    (tmp_path / ".dvc").mkdir()
    found = foresee("params.yaml")
    assert "images of 1×16×16; 29 train, 3 validation, 8 test; 2 classes" in found.notes[0]
    assert tmp_path / "flowers/aster" in found.seen
    monkeypatch.chdir(tmp_path)
    assert foresee("pipelines/mine/params.yaml").notes == found.notes


def test_a_source_that_cannot_say_anything_beforehand_is_left_to_prepare(project, monkeypatch):
    monkeypatch.delattr(Digits, "preview")
    assert foresee(project / "params.yaml").notes == ()
