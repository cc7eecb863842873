"""dvc.yaml and its stages; what would run, why and how long; changed raw data; `moecore pilot`."""

import ast
import copy
import importlib
import inspect
import json
import os
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from dvc.repo import Repo
from typer.testing import CliRunner

from moecore.core.files import UserError, file_checksum, read_json, write_json, write_json_sha256
from moecore.core.source_layout import FAMILY_FOLDERS, HASHES_DIR, ROOT
from moecore.data.prepared import Prepared
from moecore.data.sources.dialects import Dialects
from moecore.pipeline import cli, code_hashes, dvc_yaml, pilot, plan
from moecore.pipeline.plan import PlannedStage, StatusAndDag, plan_stages, stages_changed_by_code
from moecore.study import stages as stage_table
from moecore.study.params_reader import params_keys_by_field
from moecore.study.yaml_document import YamlDocument, load_yaml_document, parse_yaml_document
from moecore.tasks import Classification, NextToken
from tests import project
from tests.data.making import image_classes
from tests.project import PARAMS, Project, compose_shipped

EDGES = [
    *(("prepare", "train@a"), ("prepare", "train@b"), ("train@a", "compare")),
    *(("train@b", "compare"), ("code", "prepare"), ("code", "train@a"), ("code", "train@b")),
]


def test_changes_and_other_code_flow_downstream_in_order_and_run_nothing_else():
    status = {"train@a": [{"changed deps": {"params.yaml": {"methods.a.k": "modified"}}}]}
    status["other"] = [{"changed command": None}, "always changed"]
    assert plan_stages(StatusAndDag(status, EDGES), {"train@b": 4.0, "compare": 1.0}) == [
        PlannedStage("other", ("changed command", "always changed"), None),
        PlannedStage("train@a", ("methods.a.k modified",), 4.0),
        PlannedStage("compare", ("after train@a",), 1.0, is_certain=False),
    ]
    # its training failed: the same model may come again
    status["compare"] = [{"changed deps": {"artifacts/a": "deleted"}}]
    *_, compare = plan_stages(StatusAndDag(status, EDGES), {"train@b": 4.0, "train@c": 6.0})
    assert compare == ("compare", ("dep artifacts/a deleted",), None, False)
    # no stage that would run makes it
    del status["train@a"]
    *_, compare = plan_stages(StatusAndDag(status, EDGES), {})
    assert compare == ("compare", ("dep artifacts/a deleted",), None, True)
    assert [item.stage for item in plan_stages(StatusAndDag(EDITED, EDGES), {}, {})] == ["code"]
    planned = plan_stages(StatusAndDag(EDITED, EDGES), {}, {"train@a": ("x.py edited",)})
    assert [item.stage for item in planned] == ["code", "train@a", "compare"]
    assert planned[1].reasons == ("x.py edited",)
    assert len(plan_stages(StatusAndDag(EDITED, EDGES), {})) == 5, (
        "where it is not known, all of it"
    )


def test_lengths_are_those_of_all_stages_and_unknown_ones_are_counted():
    def planned(*seconds: float | None) -> list[PlannedStage]:
        return [PlannedStage(str(index), (), one) for index, one in enumerate(seconds)]

    assert plan.format_total_duration(planned(5400.0)) == "1 h 30 min (1 stage)"
    assert (
        plan.format_total_duration(planned(31.0, 28.4, None))
        == "59 s (3 stages, 1 of unknown length)"
    )
    assert plan.format_total_duration(planned(3590.0, 10.0)) == "1 h (2 stages)"


EDITED = {"code": [{"changed deps": {"moecore/nn": "modified"}}]}


ONE_METHOD = "run: {methods: [a]}\nmethods: {a: {router: {kind: hash}}}\n"


def finished(folder: Path) -> dict[str, dict[str, str]]:
    """What the stages ``code`` and ``train`` leave behind."""
    (folder / "params.yaml").write_text(ONE_METHOD)
    files = code_hashes.compute_code_hashes(parse_yaml_document(ONE_METHOD))
    for name, hashes in files.items():
        write_json(HASHES_DIR / name, hashes)
    stages = {
        "train@a": {"deps": [{"path": "artifacts/code/methods/a.json"}]},
        "transfer": {"deps": [{"path": "artifacts/code/methods"}]},
        "other": {"deps": [{"path": "artifacts/code/stages/pretrain.json"}]},
    }
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": stages}))
    return files


def test_which_stages_an_edit_concerns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = finished(tmp_path)
    assert stages_changed_by_code(StatusAndDag(EDITED, EDGES)) == {}
    assert stages_changed_by_code(StatusAndDag({"code": ["always changed"]}, EDGES)) == {}
    router = "moecore/nn/routers/hash.py"
    write_json(HASHES_DIR / "methods/a.json", files["methods/a.json"] | {router: "0"})
    found = stages_changed_by_code(StatusAndDag(EDITED, [*EDGES, ("train@a", "transfer")]))
    assert found == {"train@a": (f"{router} edited",), "transfer": (f"{router} edited",)}
    known = stages_changed_by_code(StatusAndDag(EDITED, EDGES))
    assert known.keys() == {"train@a"}, "a stage of the lock that the study no longer has"
    assert stages_changed_by_code(StatusAndDag({}, EDGES)) == {}, "DVC found nothing to hash again"
    lost = {"code": [{"changed outs": {"artifacts/code": "deleted"}}]}
    assert stages_changed_by_code(StatusAndDag(lost, EDGES)) is None


def test_files_that_a_kill_of_dvc_left_empty_are_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Repo.init(no_scm=True).close()
    Path("dvc.yaml").write_text("stages: {first: {cmd: echo 1 > out, outs: [out]}}\n")
    with Repo() as repo:
        repo.reproduce()
    assert "first" in Path("dvc.lock").read_text()
    Path("out").unlink()
    for content in ("", "stages: ["):
        Path("dvc.lock").write_text(content)
        said = "dvc.lock: is not as DVC writes it .*; delete it: what"
        with pytest.raises(UserError, match=said):
            plan.query_pipeline_status()
    Path("dvc.lock").unlink()
    # while `first` runs: DVC's locks name what is written
    Path("dvc.yaml").write_text("stages: {first: {cmd: echo 2 > out, outs: [out]}}\n")
    busy = {"write": {str(Path("out").resolve()): {"pid": os.getpid(), "cmd": "dvc repro"}}}
    write_json(Path(".dvc/tmp/rwlock"), busy)
    assert plan.query_pipeline_status(is_locked=False).status == {"first": ["runs now"]}
    with pytest.raises(UserError, match="is busy"):
        plan.query_pipeline_status()
    Path(".dvc/tmp/rwlock").write_text("")  # DVC's own words name the file
    with pytest.raises(UserError, match="dvc: .*rwlock"):
        plan.query_pipeline_status()
    Path(".dvc/tmp/rwlock").unlink()
    with Repo() as repo:
        repo.reproduce()
    assert Path("out").read_text() == "2\n"


DIGITS = "pretrain: {kind: digits, size: 16}"
FOLDER = "pretrain: {kind: image_folder, root: flowers, size: 16, channels: 1}"
MEND = ["dvc", "repro", "-f", "-s", "prepare@pretrain"]


def test_another_raw_folder_is_said_until_it_is_prepared_again(tmp_path, monkeypatch):
    project = Project(tmp_path, PARAMS.replace(DIGITS, FOLDER)).with_dvc()
    image_classes(tmp_path / "flowers", {"aster": 200, "rose": 200}, size=(4, 4))
    project.run(["dvc", "repro", "-q", "prepare"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moecore.pipeline.parallel.run_pipeline", lambda *_: None)

    def said(command: str) -> list[str]:
        done = CliRunner().invoke(cli.app, [command], catch_exceptions=False)
        assert done.exit_code == 0
        return [line for line in done.stdout.splitlines() if "flowers:" in line]

    assert not said("check")
    (tmp_path / "flowers/aster/000.png").unlink()
    (tmp_path / "flowers/.hidden").touch()
    for command in ("check", "plan", "run"):
        (line,) = said(command)
        assert line.startswith("params.yaml: data.pretrain: flowers: found 399 files of ")
        assert "saw 400 of" in line and " ".join(MEND) in line
    project.run(MEND)
    assert not said("check")
    (tmp_path / "flowers").rename(tmp_path / "gone")
    assert not said("check"), "what is prepared may be all there is"


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
    return CliRunner().invoke(cli.app, ["pilot", *map(str, words)], catch_exceptions=False)


def result_of(score, seconds: float = 90.0, **scores) -> pilot.PilotResult:
    rows = {role: pilot.PilotRow(role, row, [1.0, seconds]) for role, row in scores.items()}
    return pilot.PilotResult(score, rows)


def holding(result: pilot.PilotResult) -> list[bool]:
    return [verdict.holds for verdict in pilot.pilot_verdicts(result)]


def test_verdicts_by_hand_of_perplexity_in_percent_of_dense():
    """Variances 0.0002, 0.0002, 0.0018 and 0.0002: their mean's root is 0.0245, 2.45 points."""
    told = {"told": [0.59, 0.61], "begun": [0.59, 0.61]}
    result = result_of(ACCURACY, dense=[0.48, 0.50], learned=[0.545, 0.605], **told)
    assert result.advantage("told", "learned") == pytest.approx(2.5)
    assert holding(result) == [True, True, True]
    assert pilot.study_kinds_worth_running(pilot.pilot_verdicts(result)) == ["truth"]
    worse = result_of(ACCURACY, 90.1, dense=[0.50, 0.52], learned=[0.547, 0.607], **told)
    assert holding(worse) == [False, False, False]
    assert not pilot.study_kinds_worth_running(pilot.pilot_verdicts(worse))
    # Perplexity: 89 of 100 is 11 % better; variances 2 of each, so a scatter of √2 %
    score = pilot.pilot_score_kind(NextToken(words=5))
    rows = {"dense": [99.0, 101.0], "told": [88.0, 90.0], "begun": [88.0, 90.0]}
    result = result_of(score, learned=[89.4, 91.4], **rows)
    assert result.advantage("told", "dense") == pytest.approx(11)
    assert holding(result) == [True, False, True]
    assert holding(result_of(score, learned=[89.5, 91.5], **rows))[1]


@pytest.mark.parametrize(
    ("vmoe", "holds"),  # 2.1 and 1.9 points; 2.1 points with a scatter of 5.7
    [([0.619, 0.623], True), ([0.617, 0.621], False), ([0.551, 0.691], False)],
)
def test_a_hash_decides_where_there_is_no_oracle(vmoe, holds):
    result = result_of(ACCURACY, dense=[0.5, 0.5], hash=[0.59, 0.61], vmoe=vmoe)
    verdicts = pilot.pilot_verdicts(result)
    assert [verdict.holds for verdict in verdicts] == [holds, True]
    assert ("accuracy" in pilot.study_kinds_worth_running(verdicts)) is holds
    assert re.match(r"vmoe is \d+\.\d+ points better than hash; needed: 2, and", verdicts[0].text)


def test_a_linear_rule_is_fitted():
    torch.manual_seed(0)
    tokens = torch.randn(500, 6)
    chosen = (tokens @ torch.randn(3, 6).T).argmax(dim=-1)
    fitted = (tokens @ pilot.fit_linear_router_weights(tokens, chosen, 3).T).argmax(dim=-1)
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
    write_json_sha256(folder / "card.json", card)
    assert not Prepared.open(folder).test.images.any()
    monkeypatch.setattr(Dialects, "write", None)
    second = run_pilot_command(study / "params.yaml", "--seeds", 2)
    scores = [re.findall(r"\d+\.\d\d", one.stdout) for one in (first, second)]
    assert scores[0] == scores[1] and len(scores[0]) > 12


def test_a_study_without_an_oracle_trains_wide_vmoe_and_hash(study):
    moe = {"experts": STUDY["methods"]["told"]["experts"], "blocks": [0]}
    noisy = {"kind": "noisy_top_k", "k": 1}
    losses = [{"kind": "importance"}, {"kind": "load"}]
    methods = {"dense": {}, "broad": {"model": {"mlp_ratio": 1}}}
    methods |= {"routed": {**moe, "router": noisy, "regularizers": losses}}
    methods |= {"fixed": {**moe, "router": {"kind": "hash", "k": 1}}}
    run = STUDY["run"] | {"methods": [*methods]}
    model = {"kind": "vit", "patch": 4, "width": 8, "depth": 1, "heads": 1}
    text = json.dumps(STUDY | {"run": run, "methods": methods, "model": model})
    (study / "params.yaml").write_text(text, encoding="utf-8")
    said = run_pilot_command(study, "--seeds", 2)
    lines = said.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [*methods]
    assert re.match(r"(yes|no ) routed is -?\d+\.\d\d points better than fixed;", lines[5])
    assert said.exit_code == int(lines[-1] == "Not worth a study.")


@pytest.mark.parametrize("lacking", ["dense", "told"])
def test_without_a_floor_or_a_ceiling_nothing_is_trained(study, lacking):
    methods = {name: one for name, one in STUDY["methods"].items() if name != lacking}
    text = json.dumps(STUDY | {"run": STUDY["run"] | {"methods": [*methods]}, "methods": methods})
    (study / "params.yaml").write_text(text, encoding="utf-8")
    said = run_pilot_command(study)
    assert said.exit_code == 1 and said.stderr.count("\n") == 1 and not said.stdout
    assert re.search(r"params.yaml:1:\d+: methods: found \w+; allowed", said.stderr)


def test_a_folder_without_params_is_named(tmp_path):
    said = run_pilot_command(tmp_path)
    assert said.exit_code == 1 and f"{tmp_path}/params.yaml" in said.stderr


NO_PART = ("code", "numbers")  # the hashes of the code, and a copy of a file
STAGES = dvc_yaml.build_stage_entries([*stage_table.STAGES])
STAGES = {name: stage.get("do", stage) for name, stage in STAGES.items() if name not in NO_PART}


def test_the_main_dvc_yaml_is_the_table_of_stages_and_what_is_written_is_read(monkeypatch):
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    assert text == dvc_yaml.main_dvc_yaml_text(), "run `moecore study write`"
    assert parse_yaml_document(text).data == {"stages": dvc_yaml.build_stage_entries()}
    assert len(text.splitlines()) <= 170
    before = dvc_yaml.main_dvc_yaml_text().splitlines()
    row = stage_table.STAGES["pretrain"]._replace(words="{method} {seed} again")
    monkeypatch.setitem(stage_table.STAGES, "pretrain", row)
    after = dvc_yaml.main_dvc_yaml_text().splitlines()
    changed = [pair for pair in zip(before, after, strict=True) if len(set(pair)) == 2]
    assert len(changed) == 1 and changed[0][1].endswith("${item.seed} again")
    definitions = dvc_yaml.build_stage_entries([*stage_table.STAGES])
    [whole] = dvc_yaml.study_dvc_yaml_texts(definitions, {}).values()
    assert parse_yaml_document(whole).data == {"stages": definitions}
    texts = dvc_yaml.study_dvc_yaml_texts(definitions, {"methods": range(100), "seeds": range(100)})
    step = parse_yaml_document(texts["steps/prune/dvc.yaml"]).data
    assert step["vars"] == ["../../params.yaml"]
    assert step["stages"] == {"prune": {"wdir": "../..", **definitions["prune"]}}


@pytest.mark.parametrize("stage", stage_table.STAGE_ROWS, ids=lambda row: row.name)
def test_a_command_tells_its_stage(stage):
    entry = dvc_yaml.build_stage_entries([*stage_table.STAGES])[stage.name]
    words = entry.get("do", entry)["cmd"].split()[1:]
    if words[0] == "-m":
        assert stage_table.find_stage_of_command(words) == stage.name


def script_and_words(stage: dict) -> tuple[str, list[str]]:
    """``python -m moecore.stages.pretrain ${item.method}`` → pretrain, [${item.method}]."""
    words = shlex.split(stage["cmd"])
    return words[2].removeprefix("moecore.stages."), words[3:]


def calls_of(script: str, name: str) -> list[ast.Call]:
    tree = ast.parse((ROOT / "stages" / f"{script}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]


def argument_names(script: str) -> list[str]:
    (called,) = (call.args[0].id for call in calls_of(script, "run_stage"))
    module = importlib.import_module(f"moecore.stages.{script}")
    return list(inspect.signature(getattr(module, called)).parameters)


def read_calls(script: str) -> dict[str, str]:
    """What fills templates: `read_stage_params(Params, data=name)` says that `{data}` is `name`."""
    words = [word for call in calls_of(script, "read_stage_params") for word in call.keywords]
    return {w.arg: w.value.id for w in words if w.arg and isinstance(w.value, ast.Name)}


def keys_of(stage: dict) -> dict[str, str]:
    """Field of the script's Params → key of params.yaml, as dvc.yaml writes it."""
    script, words = script_and_words(stage)
    if script == "measure":
        # any measurement may look at region experts, which the method names; routing does not
        names = {"method": "methods.${item.method}"} if words[0] == "${item.what}" else {}
        return {words[0]: words[0]} | names
    if script == "calculate":
        return {words[0]: words[0]}
    if script == "robustness":  # as `measure` does it
        return {script: script}
    if (params := params_of(stage)) is None:
        return {}
    filled = dict(zip(argument_names(script), words, strict=True))
    fills = {slot: filled[argument] for slot, argument in read_calls(script).items()}
    keys, fill = params_keys_by_field(params), lambda match: fills[match[1]]
    return {field: re.sub(r"\{(\w+)\}", fill, template) for field, template in keys.items()}


def params_of(stage: dict) -> type | None:
    """What the script reads of params.yaml; ``finetune`` has other settings for attacked images."""
    script, words = script_and_words(stage)
    name = "AdversarialFinetuneParams" if words[:1] == ["adversarial"] else "Params"
    return getattr(importlib.import_module(f"moecore.stages.{script}"), name, None)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_the_params_that_it_reads_on_its_script_and_on_their_parts(name):
    keys = set(STAGES[name].get("params", []))
    assert keys == set(keys_of(STAGES[name]).values())
    script, _ = script_and_words(STAGES[name])
    deps = STAGES[name]["deps"]
    settings = {path for path in deps if path.startswith("artifacts/code/settings/")}
    if "params.yaml" not in deps:
        assert settings == {f"artifacts/code/settings/{key}.json" for key in keys}
    assert f"artifacts/code/stages/{script}.json" in deps
    assert not [path for path in deps if path.startswith(("moecore", "artifacts/hist"))]
    if "${item.method}" in STAGES[name]["cmd"]:
        assert "artifacts/code/methods/${item.method}.json" in deps
    if script in ("measure", "calculate", "robustness", "transferred"):
        what = (
            script_and_words(STAGES[name])[1][0]
            if script in ("measure", "calculate")
            else "robustness"
        )
        assert f"artifacts/code/measure/{what}.json" in deps
        return
    for field, key in keys_of(STAGES[name]).items():
        modules = parts_in(params_of(STAGES[name]).model_fields[field].annotation)
        parts = [f"moecore.{family.replace('/', '.')}." for family in FAMILY_FOLDERS]
        if not any(part in text for part in parts for text in modules):
            continue
        top = key.split(".")[0]
        exact = {"data": f"sections/{key}", "methods": key.replace(".", "/", 1)}
        files = {"model": "methods/${item.method}"} | exact
        assert f"artifacts/code/{files.get(top, f'sections/{top}')}.json" in deps


def paths_dvc_leaves_out(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of settings that are not in the key of DVC's run cache."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key in ("size", "nfiles"):
            yield (*path, key)
        elif isinstance(inner, (dict, list)):
            yield from paths_dvc_leaves_out(inner, (*path, key))


@pytest.mark.parametrize("study", [None, "ours/ablations", "ours/sizes"])
def test_settings_that_dvcs_run_cache_leaves_out_have_a_hash_that_stages_depend_on(study):
    document = compose_shipped(study).document if study else load_yaml_document(project.SHIPPED)
    before = code_hashes.hash_settings_by_key(document)
    paths = list(paths_dvc_leaves_out(document.data))
    assert paths
    for path in paths:
        key = ".".join(path[: 1 + (path[0] in ("data", "methods", "paper_models"))])
        if key not in before:
            assert path[1] not in document.data["run"]["methods"], "a method that no stage trains"
            continue
        edited = YamlDocument(document.path, copy.deepcopy(document.data))
        holder = edited.data
        for word in path[:-1]:
            holder = holder[word]
        holder[path[-1]] = "another"
        after = code_hashes.hash_settings_by_key(edited)
        assert {name for name in before if before[name] != after[name]} == {key}, path


def test_equal_settings_have_equal_hashes():
    run = {"methods": []}
    one = YamlDocument("params.yaml", {"run": run, "model": {"width": 8, "rate": 1e-3}})
    other = YamlDocument("params.yaml", {"run": run, "model": {"rate": 0.001, "width": 8.0}})
    assert code_hashes.hash_settings_by_key(one) == code_hashes.hash_settings_by_key(other)


def parts_in(annotation: object, seen: frozenset = frozenset()) -> set[str]:
    """The modules of the parts (classes with a ``kind``) inside a type."""
    found: set[str] = set()
    for inner in typing.get_args(annotation):
        found |= parts_in(inner, seen)
    if hasattr(annotation, "model_fields") and annotation not in seen:
        if "kind" in annotation.model_fields:
            found.add(f"{annotation.__module__}.")
        for field in annotation.model_fields.values():
            found |= parts_in(field.annotation, seen | {annotation})
    return found


@pytest.mark.parametrize(
    ("name", "number"), [("ours/ablations", 1), ("ours/routers", 1), ("moge/swin", 2)]
)
def test_no_lock_file_of_a_study_has_hundreds_of_stages_but_of_one_kind(name, number):
    """After every stage DVC reads and writes the lock file that has it: 1 s per 100 stages."""
    composed = compose_shipped(name, number=number)
    run = composed.document.data["run"]
    texts = dvc_yaml.study_dvc_yaml_texts(dvc_yaml.build_stage_entries(composed.stages), run)
    for file, text in texts.items():
        stages = parse_yaml_document(text).data["stages"]
        assert (
            len(stages) == 1 or dvc_yaml.count_expanded_stages(stages, run) <= dvc_yaml.LARGE_STUDY
        ), file
    assert (len(texts) > 1) == (name == "ours/ablations")
