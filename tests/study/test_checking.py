import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.study import check
from moecore.study.params_writer import dump_inline_yaml
from moecore.study.yaml_document import load_yaml_document, parse_yaml_document
from tests.data.making import image_classes
from tests.project import PARAMS, check_params, compose_shipped, write_question

QUESTIONS = ("ermoe/image_text", "moge/swin", "ours/routers", "prc/paper_scale")
STAGES = tuple(key for key in load_yaml_document(ROOT / "dvc.yaml").data["stages"] if key != "code")
VOLUMES = dump_inline_yaml(compose_shipped("ermoe/brain_age").document.data)
WORDS = """\
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
CAPTIONS = """\
run: {methods: [dense], seeds: [0], phases: [pretrain], measurements: [retrieval]}
data: {pretrain: {kind: captioned_mosaic, source: {kind: digits}}}
model: {kind: two_towers, image: {kind: vit, patch: 14, width: 32, depth: 4, heads: 2}}
methods: {dense: {}}
teacher: {kind: no_teacher}
pretrain: {epochs: 1, batch: 8, learning_rate: 0.001, views: {shift: 1}}
retrieval: {at: [1]}
"""
IMAGES = PARAMS
GONE = "(gone)"  # instead of a value: the key is removed
TEXTS = {"images": IMAGES, "volumes": VOLUMES, "words": WORDS, "captions": CAPTIONS}
WRONG = yaml.safe_load(Path(__file__).with_name("wrong_settings.yaml").read_text(encoding="utf-8"))


def edited(text: str, edits: dict[str, Any]) -> str:
    data = yaml.safe_load(text)
    for keys, value in edits.items():
        *way, last = [int(word) if word.isdigit() else word for word in keys.split(".")]
        inner = data
        for word in way:
            inner = inner[word]
        if value == GONE:
            del inner[last]
        else:
            inner[last] = deepcopy(value)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def in_its_place(line: str, text: str, key: str) -> bool:
    """Whether a message is of ``key`` and stands at the last of its words that the file has."""
    match = re.match(r"(?:.*/)?params.yaml:(\d+):(\d+): ([^ ]*): ", line)
    if match is None or match[3] != key:
        return False
    rest = text.splitlines()[int(match[1]) - 1][int(match[2]) - 1 :]
    words = re.split(r"[.\[]", key)
    known = "missing" in line or words[-1].endswith("]")
    return known or any(rest.lstrip("'\"").startswith(word) for word in words)


def assert_one_line_names(key: str, lines: list[str], text: str) -> None:
    """One line is of a key, stands at its place, and says what was found and what is allowed."""
    [line] = [line for line in lines if f": {key}: " in line] or [f"no line of {key}: {lines}"]
    assert in_its_place(line, text, key), line
    assert re.search(rf": {re.escape(key)}: \S.*; (allowed|set `root`)", line), line


CLAIM = {"paper": "PRC", "source": "table 4", "says": "so", "quote": "It is so."}
QUESTION = {"metric": "match_top1", "method": "tgr", "against": "vmoe", "better": "higher"}
CLAIM |= QUESTION
TURNED = CLAIM | {"method": "vmoe", "against": "tgr", "better": "lower", "says": "turned round"}
SIZE = {"better": "equivalent", "margin": 0.1, "reference_effect": 0.3}
UNQUOTED = {key: value for key, value in CLAIM.items() if key != "quote"}
ASKED = QUESTION | {"asks": "so"}
SWIN = {"kind": "swin_v2", "patch": 4, "width": 24, "depths": [2, 2], "heads": [2, 4], "window": 2}
CLAIMS = [
    ({"claims": [CLAIM | {"method": "tgrr"}]}, "claims[0].method"),
    ({"claims": [CLAIM | {"phase": "adversarial"}]}, "claims[0].phase"),
    ({"claims": [ASKED]}, "claims[0].source"),
    ({"claims": [UNQUOTED]}, "claims[0].quote"),
    ({"claims": [CLAIM, CLAIM]}, "claims[1].metric"),
    ({"claims": [CLAIM, TURNED]}, "claims[1].metric"),
    ({"claims": [CLAIM | SIZE, TURNED | SIZE]}, "claims[1].metric"),
    ({"questions": [ASKED | {"margin": 0.1}]}, "questions[0]"),
    ({"questions": [ASKED | {"against": "tgr"}]}, "questions[0].against"),
    ({"methods." + "a" * 101: {}}, f"methods.{'a' * 28}...{'a' * 28}"),
]


def wrong_settings(part: str) -> list[tuple[str, dict[str, Any], str]]:
    return [(TEXTS[name], edit, key) for name, cases in WRONG[part].items() for key, edit in cases]


@pytest.mark.parametrize("name", QUESTIONS)  # `moecore study check --all` tries all
def test_our_files_are_in_order_and_editors_accept_them(tmp_path, name):
    path = write_question(tmp_path, name)
    study = check_params(path)
    assert set(study.run.methods) <= set(study.methods)
    pytest.importorskip("jsonschema").validate(load_yaml_document(path).data, check.params_schema())


def test_the_file_of_the_root_is_in_order_and_names_the_schema():
    path = ROOT / "params.yaml"
    assert check_params(path).run.methods
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    assert first == "# yaml-language-server: $schema=params.schema.json"


@pytest.mark.parametrize("text", [IMAGES, WORDS, CAPTIONS, VOLUMES], ids="IWCV")
def test_a_study_is_in_order(text):
    assert check.read_study_and_problems(parse_yaml_document(text), ())[1] == []


def test_a_sentence_may_claim_a_direction_and_a_size():
    written = edited(IMAGES, {"claims": [CLAIM, CLAIM | SIZE]})
    assert check.read_study_and_problems(parse_yaml_document(written), STAGES)[1] == []


FILE = [*wrong_settings("file"), *((IMAGES, edits, key) for edits, key in CLAIMS)]


@pytest.mark.parametrize(("text", "edits", "key"), FILE)
def test_what_is_wrong_in_the_file_is_named(text, edits, key):
    written = edited(text, edits)
    stages = STAGES if text is IMAGES else ()
    _, lines = check.read_study_and_problems(parse_yaml_document(written), stages)
    assert_one_line_names(key, lines, written)


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with a params.yaml on data that every machine has, and dvc.yaml."""
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (tmp_path / "params.yaml").write_text(IMAGES, encoding="utf-8")
    return tmp_path


def refused(path: Path, edits: dict[str, Any] | None = None, text: str = IMAGES) -> list[str]:
    path.write_text(edited(text, edits or {}), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check.check_study(path)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(("text", "edits", "key"), wrong_settings("run"))
def test_what_was_seen_to_fail_later_is_said_first(project, text, edits, key):
    path = project / "params.yaml"
    if text is not IMAGES:
        (project / "dvc.yaml").unlink()
    lines = refused(path, edits, text)
    assert_one_line_names(key, lines, path.read_text(encoding="utf-8"))
    assert max(map(len, lines)) < 2000


LIMITED = {"kind": "noisy_top_k", "k": 1, "capacity_factor": 1.0, "group_size": 1}
# A router that sees later words: the last words of its key, its settings
LOOKAHEADS = [
    ("router.kind", {"kind": "expert_choice"}),
    ("router.balance.kind", {"kind": "noisy_top_k", "balance": {"kind": "sinkhorn"}}),
    ("router.kind", {"kind": "soft_slots"}),
    ("router.kind", {"kind": "merged"}),
    ("router.kind", {"kind": "hash", "by": "patch"}),
    ("router.kind", {"kind": "told"}),
    ("router.k", LIMITED | {"k": 2}),
    ("router.batch_priority", LIMITED | {"batch_priority": True}),
    ("router.router.k", {"kind": "frozen_copy", "router": LIMITED | {"k": 2}}),
    ("router.sampling", {"kind": "depth", "router": {"kind": "noisy_top_k"}}),
]


@pytest.mark.parametrize(("text", "tower"), [(WORDS, ""), (CAPTIONS, "text.")])
def test_routers_that_look_ahead_are_refused_line_by_line(project, text, tower):
    (project / "dvc.yaml").unlink()
    methods = {}
    for number, (_, router) in enumerate(LOOKAHEADS):
        experts = {"kind": "mlp", "number": 4, "hidden_ratio": 1}
        part = {"router": router, "experts": experts, "blocks": "all"}
        methods[f"m{number}"] = {"text": part} if tower else part
    edits: dict[str, Any] = {"methods": methods, "run.methods": list(methods)}
    path = project / "params.yaml"
    lines = refused(path, edits | ({"model.image.patch": 4} if tower else {}), text)
    written = path.read_text(encoding="utf-8")
    assert len(lines) == len(LOOKAHEADS), lines
    for number, (key, _) in enumerate(LOOKAHEADS):
        assert in_its_place(lines[number], written, f"methods.m{number}.{tower}{key}"), lines
        assert "found" in lines[number] and "allowed" in lines[number]


def test_a_measurement_may_be_off_and_problems_come_in_the_order_of_the_file():
    text = edited(IMAGES, {"run.measurements": ["cost"]})
    assert check.read_study_and_problems(parse_yaml_document(text), STAGES)[1] == []
    text = edited(IMAGES, {"run.seeds": [0, 0], "pretrain.unknown": 1})
    one, other = check.read_study_and_problems(parse_yaml_document(text), STAGES)[1]
    assert "run.seeds[1]" in one and "pretrain.unknown: unknown key" in other


def test_a_thousand_mistakes_are_twenty_lines_and_their_number(project):
    lines = refused(project / "params.yaml", {f"u{number}": 1 for number in range(1000)})
    assert len(lines) == 21 and lines[-1].endswith("and 980 more; mend these first")


def test_a_study_in_order_says_what_its_data_are(project):
    said = "1,294 train, 144 validation, 359 test; 10 classes"
    assert check.check_study(project / "params.yaml").notes[:2] == (
        f"data.pretrain: Digits; images of 1×16×16; {said}",
        f"data.finetune: Digits; images of 1×24×24; {said}",
    )
    head, *notes = check.check_and_describe(project / "params.yaml").splitlines()
    assert head.endswith("params.yaml: in order (dense, vmoe, tgr; seeds 0)") and len(notes) == 5
    assert "teacher.training: 40 training steps, and fewer than 100" in notes[2]
    assert {path.name for path in project.iterdir()} == {"params.yaml", "dvc.yaml"}


def noted(path: Path, edits: dict[str, Any]) -> str:
    path.write_text(edited(IMAGES, edits), encoding="utf-8")
    few = "and fewer than 100 rarely teach a model"
    return "\n".join(note for note in check.check_study(path).notes[2:] if few not in note)


def test_what_is_better_known_beforehand_is_said(project):
    path = project / "params.yaml"
    several = {"run.seeds": [0, 1, 2]}
    assert noted(path, several) == "", "tgr needs the teachers"
    assert noted(path, several | {"run.methods": ["vmoe"]}).startswith("teacher: 3 are trained")
    assert noted(path, {"run.methods": ["vmoe"]}) == "", "one seed trains one, as ever"
    swin = {"model": SWIN, "teacher.model": SWIN, "methods.vmoe.router.k": 1}
    assert noted(path, swin).startswith("methods vmoe: one expert per token in a swin_v2")
    assert noted(path, swin | {"model.kind": "swin_moe", "teacher.model.kind": "swin_moe"}) == ""


def test_missing_data_are_named_and_the_rest_is_checked(project):
    path = project / "params.yaml"
    root = {"data.pretrain": {"kind": "image_folder", "root": "flowers", "channels": 1, "size": 16}}
    missing, rest = refused(path, root)
    assert "data.pretrain.root: flowers: no such folder; set `root`" in missing
    assert rest.endswith("params.yaml: all else is in order")
    lines = refused(path, root | {"finetune.batch": 401, "run.seeds": [0, 0]})
    keys = [line.split(": ")[1] for line in lines]
    assert keys == ["run.seeds[1]", "data.pretrain.root", "finetune.batch"], "first the file"


def test_a_download_is_said_and_no_mistake(project):
    cifar = {"kind": "cifar", "download": True, "size": 16}
    text = edited(IMAGES, {"data.pretrain": cifar, "data.finetune": cifar})
    (project / "params.yaml").write_text(text, encoding="utf-8")
    (note, *_) = check.check_study(project / "params.yaml").notes
    assert "prepare will download it into data/" in note


def test_paths_count_from_the_folder_of_the_study_and_from_the_repository(tmp_path, monkeypatch):
    study = tmp_path / ".runs/own.mine"
    study.mkdir(parents=True)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    (study / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    root = {"kind": "image_folder", "root": "flowers", "size": 16, "channels": 1}
    edits = {"data.pretrain": root, "pretrain.batch": 8, "teacher.training.batch": 8}
    edits["teacher_router.batch"] = 8
    image_classes(tmp_path / "flowers", {"aster": 20, "rose": 20})
    monkeypatch.chdir(study)
    assert "flowers: no such folder" in refused(Path("params.yaml"), edits)[0]
    (study / ".dvc").mkdir()  # a DVC project within that of the repository
    (tmp_path / ".dvc").mkdir()
    notes = check.check_study("params.yaml").notes
    assert "images of 1×16×16; 29 train, 3 validation, 8 test; 2 classes" in notes[0]
    monkeypatch.chdir(tmp_path)
    assert check.check_study(".runs/own.mine/params.yaml").notes == notes


def test_predictions_that_no_stage_makes_are_refused():
    text = edited(VOLUMES, {"calibrate.calibrator.fit_on": "out_of_fold"})
    document = parse_yaml_document(text, "params.yaml")

    def refusals(*stages: str) -> list[str]:
        _, lines = check.read_study_and_problems(document, ["calibrate", *stages])
        return [line for line in lines if "calibrate.calibrator.fit_on" in line]

    assert not refusals("out_of_fold")
    (line,) = refusals()
    assert in_its_place(line, text, "calibrate.calibrator.fit_on") and "not in dvc.yaml" in line


@pytest.mark.parametrize("section", ["transfer", "out_of_fold"])
def test_a_section_whose_stage_is_missing_is_refused(section):
    settings = {"transfer": {"attack": {"kind": "pgd"}}, "out_of_fold": {}}[section]
    document = parse_yaml_document(edited(IMAGES, {section: settings}), "params.yaml")
    assert check.read_study_and_problems(document, [*STAGES, section])[1] == []
    without = [name for name in STAGES if name != section]
    (line,) = check.read_study_and_problems(document, without)[1]
    assert f" {section}: found a section that no stage reads; allowed: " in line
    assert f"`moecore upgrade --yes --stage {section}`" in line
