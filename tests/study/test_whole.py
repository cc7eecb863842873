"""The whole of params.yaml: ours is in order; what does not fit is found before anything runs."""

import json

import pytest

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.study.document import load
from moecore.study.whole import check, schema

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
            ": claims[0].method: found 'prcc', did you mean 'prc'?; allowed: dense, vmoe, prc",
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
            "\nclaims: []",
            "\nclaims: [{paper: PRC, source: table 4, says: steadier, metric: match_top1, "
            "method: prc, against: vmoe, better: higher}]",
            ": run.seeds: found one seed, and claims; allowed: two seeds or more, or questions",
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
