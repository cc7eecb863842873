"""The whole of params.yaml: ours is in order; what does not fit is found before anything runs.

A study as what differs from the root's params.yaml: laid over it, written, kept fresh.
"""

import json
import shutil
from pathlib import Path
from textwrap import indent

import pytest

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.study.document import load, parse
from moecore.study.overlay import merge, resolve
from moecore.study.whole import check, schema
from moecore.study.written import changes, params_text, write_params

FILE = ROOT / "params.yaml"
STUDIES = [FILE, *sorted((ROOT / "pipelines").glob("*/params.yaml"))]


@pytest.fixture
def problems(tmp_path):
    """The problems of our own params.yaml after replacements."""
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())

    def find(*replacements: tuple[str, str]) -> str:
        text = FILE.read_text(encoding="utf-8")
        for old, new in replacements:
            assert old in text, f"{old!r} is not in params.yaml"
            text = text.replace(old, new, 1)
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            check(tmp_path / "params.yaml")
        return str(caught.value)

    return find


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_our_files_are_in_order(path):
    study = check(path)
    assert set(study.run.methods) <= set(study.methods)


def test_the_schema_is_fresh():
    written = json.loads((ROOT / "params.schema.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(schema())), "run `moecore schema`"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_editors_find_the_schema_and_it_accepts_the_file(path):
    jsonschema = pytest.importorskip("jsonschema")
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    place = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / place).resolve() == ROOT / "params.schema.json"
    jsonschema.validate(load(str(path)).data, schema())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "methods: [dense, vmoe, prc",
            "methods: [dense, vmeo, prc",
            ": run.methods[1]: found 'vmeo', did you mean 'vmoe'?; allowed: dense, vmoe, ",
        ),
        (
            "methods: [dense, vmoe, prc",
            "methods: [dense, vmoe, prc, vmoe",
            ": run.methods[3]: 'vmoe' is there twice; keep one",
        ),
        ("seeds: [0", "seeds: [-1", ": run.seeds[0]: found -1; allowed: integers ≥ 0"),
        ("seeds: [0", "seeds: [0, 0", ": run.seeds[1]: 0 is there twice; keep one"),
        (
            "\n  dense: {}\n",
            "\n  dense: {}\n  soft-moe: {}\n",
            ": methods.soft-moe: found the name 'soft-moe'; allowed: small letters",
        ),
        ("\npretrain:\n", "\npretrian:\n", ": pretrian: unknown key, did you mean 'pretrain'?"),
        (
            "\nmodel: {kind: vit, ",
            "\nmodel: {",
            ": model: kind is missing; allowed: kind: single_layer | vit",
        ),
        (
            "\nclaims: []",
            "\nclaims: [{paper: PRC, says: steadier, metric: match_top1, "
            "source: table 4, method: prcc, against: vmoe, better: higher}]",
            ": claims[0].method: found 'prcc', did you mean 'prc'?; allowed: ",
        ),
        (
            "\nclaims: []",
            "\nclaims: [{paper: PRC, says: steadier, metric: match_top1, "
            "method: prc, against: vmoe, better: higher}]",
            ": claims[0].source: missing; allowed: text",
        ),
        (
            "\nclaims: []",
            "\nclaims: [{paper: PRC, source: table 4, says: steadier, metric: match_top1, "
            "method: prc, against: vmoe, better: equivalent}]",
            ": claims[0]: better is equivalent and margin is missing; allowed: margin, a number",
        ),
        (
            "\nquestions: []",
            "\nquestions: [{asks: steadier, metric: match_top1, method: prc, against: vmoe, "
            "better: higher, margin: 0.1}]",
            ": questions[0]: found margin 0.1 with better: higher; allowed: a margin with better: "
            "equivalent only",
        ),
        (
            "\nquestions: []",
            "\nquestions: [{asks: steadier, metric: match_top1, method: prc, against: prc, "
            "better: higher}]",
            ": questions[0].against: found 'prc', the method itself; allowed: another of dense",
        ),
        (
            "calibrator: {kind: temperature}",
            "calibrator: {}",
            ": calibrate.calibrator: kind is missing; allowed: kind: temperature | linear",
        ),
    ],
)
def test_misfits(problems, old, new, expected):
    assert expected in problems((old, new))


def test_problems_of_all_sorts_come_together_in_the_order_of_the_file(problems):
    lines = problems(
        ("seeds: [0", "seeds: [0, 0"), ("\npretrain:\n", "\npretrain:\n  unknown: 1\n")
    ).split("\n")
    assert (
        len(lines) == 2
        and "run.seeds[1]" in lines[0]
        and "pretrain.unknown: unknown key" in lines[1]
    )


def test_a_regularizer_needs_what_is_there(tmp_path):
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    text = FILE.read_text(encoding="utf-8")
    start = text.index("\nteacher:\n") + 1
    end = text.index("\n\n", start)
    text = text[:start] + "teacher: {kind: no_teacher}" + text[end:]
    text = text.replace(
        "\n  dense: {}\n", "\n  dense: {regularizers: [{kind: importance, weight: 0.1}]}\n"
    )
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check(tmp_path / "params.yaml")
    assert (
        "methods.dense.regularizers[0]: importance needs a router, but the method has no router"
        in str(caught.value)
    )
    assert (
        "methods.tgr.regularizers[0]: router_kl needs a teacher, but teacher.kind is no_teacher; "
        "allowed: dense, timm" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "\nteacher_router: {",
            "\nlinear_experts: {}\nteacher_router: {",
            ": linear_experts: no stage of dvc.yaml reads it; allowed: run, ",
        ),
        (
            "\ncalibrate:\n  calibrator: {kind: temperature}\n",
            "\ncalibrate:\n",
            ": calibrate: found null; allowed: the keys calibrator, ",
        ),
        (
            "\ninvariance: {images: 200}",
            "\n",
            "params.yaml:1:1: invariance: missing; the stage measure reads it; allowed: the keys ",
        ),
        (
            "\n  finetune: {kind: digits, size: 42}",
            "\n",
            ": data.finetune: missing; the stage finetune trains on it; data has: pretrain",
        ),
        (
            "\n  measurements: [invariance, corruptions",
            "\n  measurements: [invarianse, corruptions",
            ": run.measurements[0]: found 'invarianse', did you mean 'invariance'?; allowed: inv",
        ),
        (
            "\n  thorough: [pretrain]",
            "\n",
            ": run.thorough: missing; the stage measure of dvc.yaml goes by it; allowed: a list",
        ),
    ],
)
def test_sections_are_what_the_stages_read(problems, old, new, expected):
    assert expected in problems((old, new))


def test_a_measurement_may_be_switched_off(tmp_path):
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    text = FILE.read_text(encoding="utf-8").replace(
        "  measurements: [invariance, corruptions, stability, lipschitz, cost, explorer]",
        "  measurements: [cost]",
        1,
    )
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    assert check(tmp_path / "params.yaml").run.measurements == ("cost",)


OVERLAYS = sorted((ROOT / "pipelines").glob("*/overlay.yaml"))


@pytest.fixture
def study(tmp_path):
    """A study of this overlay, beside a copy of the root's params.yaml."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)

    def make(overlay: str, **presets: str) -> Path:
        folder = tmp_path / "pipelines/own"
        folder.mkdir(parents=True)
        (folder / "overlay.yaml").write_text(overlay, encoding="utf-8")
        if presets:
            text = "".join(f"{name}:\n{indent(one, '  ')}" for name, one in presets.items())
            (folder / "presets.yaml").write_text(text, encoding="utf-8")
        return folder

    return make


def values(folder: Path, *presets: str) -> dict:
    return resolve(folder, folder.parents[1], presets).document.data


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.parent.name)
def test_written_files_are_fresh(path):
    written = (path.parent / "params.yaml").read_text(encoding="utf-8")
    assert written == params_text(path.parent, ROOT), "run `moecore study write`"
    assert load(str(path.parent / "params.yaml")).data == values(path.parent)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.parent.name)
def test_overlays_are_short(path):
    """Beside the list of methods and what is asked of them, which a study of ablations has many."""
    lines = path.read_text(encoding="utf-8").splitlines()
    section = ""
    others = 0
    for line in lines:
        if line and not line[0].isspace() and line[0] not in "#-":
            section = line.partition(":")[0]
        others += section not in ("methods", "claims", "questions")
    assert others <= 60


def test_merging():
    assert merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4, "z": 5}}) == {
        "a": {"x": 1, "y": 4, "z": 5},
        "b": 3,
    }
    assert merge({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}
    assert merge({"a": {"x": 1}}, {"a": None}) == {"a": None}
    assert merge({"a": None}, {"a": {"x": 1}}) == {"a": {"x": 1}}


def test_parts_of_another_kind_are_replaced_and_of_the_same_kind_merged():
    cifar = {"d": {"kind": "cifar", "classes": 10}}
    assert merge(cifar, {"d": {"kind": "imagenet"}}) == {"d": {"kind": "imagenet"}}
    larger = {"d": {"kind": "cifar", "classes": 10, "size": 8}}
    assert merge(cifar, {"d": {"kind": "cifar", "size": 8}}) == larger
    assert merge(cifar, {"d": {"size": 8}}) == larger


def test_merging_changes_neither_side():
    base, over = {"a": {"x": 1}}, {"a": {"y": [2]}}
    merge(base, over)
    assert base == {"a": {"x": 1}} and over == {"a": {"y": [2]}}


def test_an_overlay_of_five_lines_is_a_study(study):
    folder = study(
        "# Does a second seed change the picture?\n"
        "run: {methods: [dense, vmoe], seeds: [0, 1], phases: [pretrain]}\n"
        "stages: [prepare, teacher_router, pretrain, measure, compare]\n"
        "model: {width: 48}\n"
        "pretrain: {epochs: 1}\n"
    )
    assert list(write_params(folder, folder.parents[1]))
    root = load(str(ROOT / "params.yaml")).data
    found = load(str(folder / "params.yaml")).data
    assert found["model"] == root["model"] | {"width": 48}
    assert found["methods"] == root["methods"] and found["cost"] == root["cost"]
    assert found["data"] == {"pretrain": root["data"]["pretrain"]}
    assert "robustness" not in found and "finetune" not in found and "teacher" not in found
    assert check(folder / "params.yaml").pretrain.epochs == 1
    assert not list(write_params(folder, folder.parents[1]))


def test_sections_given_whole_inherit_nothing(study):
    folder = study("whole: [routing]\nrouting: {images: 5}\n")
    assert values(folder)["routing"] == {"images": 5}


def test_methods_are_those_that_the_overlay_names(study):
    folder = study("run: {methods: [vmoe]}\nmethods:\n  vmoe: {router: {k: 1}}\n  own: {}\n")
    root = load(str(ROOT / "params.yaml")).data["methods"]["vmoe"]
    changed = root | {"router": root["router"] | {"k": 1}}
    assert values(folder)["methods"] == {"vmoe": changed, "own": {}}


def test_null_removes_sections_methods_and_data(study):
    overlay = (
        "run: {phases: [pretrain]}\ndata: {finetune: null}\nclaims: null\npretrain: {clip: null}\n"
    )
    found = values(study(overlay))
    assert list(found["data"]) == ["pretrain"] and "claims" not in found
    assert found["pretrain"]["clip"] is None, "further in, null is a value"


def test_presets_are_laid_over_in_order_and_their_methods_added(study):
    one = "methods: {own: {}}\nmodel: {width: 48}\n"
    folder = study("methods: {vmoe: {}}\n", one=one, two="model: {width: 24}\n")
    assert list(values(folder, "one")["methods"]) == ["vmoe", "own"]
    assert values(folder, "one", "two")["model"]["width"] == 24


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        (
            "modle: {}\n",
            "overlay.yaml:1:1: modle: unknown section, did you mean 'model'?; allowed: ",
        ),
        (
            "- 1\n",
            "overlay.yaml:1:1: found no mapping; allowed: sections of params.yaml (run, data",
        ),
        (
            "stages: [pretrian]\n",
            "overlay.yaml:1:10: stages[0]: found 'pretrian', did you mean 'pr",
        ),
        ("whole: model\n", "overlay.yaml:1:1: whole: found no list; allowed: a list of run, data"),
        (
            "run: {}\nmodel: {width: wide}\n",
            "overlay.yaml:2:9: model.width: found 'wide' (str); allowed: integer",
        ),
        (
            "run: {methods: [vmeo]}\n",
            "overlay.yaml:1:17: run.methods[0]: found 'vmeo', did you mean",
        ),
        (
            "pretrain: null\n",
            "overlay.yaml:1:1: pretrain: missing; the stage pretrain reads it; all",
        ),
    ],
)
def test_wrong_overlays_name_their_line_and_write_nothing(study, overlay, said):
    folder = study(overlay)
    with pytest.raises(UserError) as caught:
        list(write_params(folder, folder.parents[1]))
    assert said in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == ["overlay.yaml"]


def test_a_fault_in_a_preset_or_in_the_root_is_found_where_it_stands(study):
    folder = study("run: {methods: [vmoe]}\n", wrong="\n\nmodel: {width: wide}\n")
    with pytest.raises(UserError, match=r"presets.yaml:4:11: model.width: found 'wide'"):
        params_text(folder, folder.parents[1], ["wrong"])
    root = folder.parents[1] / "params.yaml"
    root.write_text(root.read_text().replace("batch: 128", "batch: none", 1), encoding="utf-8")
    with pytest.raises(UserError, match=r"own/\.\./\.\./params.yaml|/params.yaml:\d+:\d+: teacher"):
        params_text(folder, folder.parents[1])


def test_an_unknown_preset_names_those_there_are(study):
    folder = study("run: {methods: [vmoe]}\n", flowers="model: {width: 48}\n")
    with pytest.raises(UserError, match="'flower', did you mean 'flowers'[?]; allowed: flowers"):
        resolve(folder, folder.parents[1], ["flower"])


def test_changes():
    before, after = {"a": {"x": 1, "y": None}, "b": [1]}, {"a": {"x": 1, "y": 2, "z": "text"}}
    assert list(changes(before, after)) == [
        "a.y: null → 2",
        'a.z: (absent) → "text"',
        "b: [1] → (absent)",
    ]


def test_what_is_written_says_where_it_comes_from(study):
    folder = study("run: {methods: [vmoe]}\n", one="model: {width: 48}\n")
    text = params_text(folder, folder.parents[1], ["one"])
    assert "# ../../params.yaml + overlay.yaml\nrun:\n" in text
    assert "# ../../params.yaml + presets.yaml\nmodel: {" in text
    assert "# ../../params.yaml\npretrain:\n" in text and "# With the presets one.\n" in text
    assert parse(text).data == values(folder, "one")
