"""`moecore new`: a whole project or nothing; projects that earlier versions began, upgraded."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from moecore.core.files import UserError
from moecore.core.source_layout import PROJECT_ANSWERS_FILE, ROOT, list_dvc_files
from moecore.pipeline import cli, dvc_yaml
from moecore.pipeline.project_files import render_project_template
from moecore.pipeline.project_record import hash_text, moecore_requirement
from moecore.study import check, params_writer, questions
from moecore.study.params_writer import RENAMED_KEYS, RenamedKey, rename_keys_in_text
from moecore.study.yaml_document import load_yaml_document, parse_yaml_document
from moecore.tracking.mlflow_connection import experiment_name, find_project_root
from tests import forked
from tests.my_lab import forget_package
from tests.project import check_params

WRITTEN = {
    *".dvc/.gitignore .dvc/config .dvcignore .github/workflows/test.yml .gitignore".split(),
    *".moecore.json Makefile README.md dvc.yaml params.yaml pyproject.toml".split(),
    *"src/own/__init__.py src/own/cosine.py tests/test_cosine.py".split(),
}
MADE_CALCULATIONS = ("linear_experts", "sizes")  # sections of 0.2 that calculations have now


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder; what a project's package put into this process is forgotten afterwards."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    forget_package("own")


def moecore(*words: str):
    return CliRunner().invoke(cli.app, words, catch_exceptions=False)


def run_tests(*files: str) -> None:
    """Run pytest in a process, in the project here."""
    code = f"import pytest, sys; sys.exit(pytest.main(['-q', *{files}]))"
    done = forked.run(Path.cwd(), ("script", code), dict(os.environ))
    assert done.returncode == 0, done.stdout


def files_below(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {file.as_posix() for file in files if file.parts[0] != ".git"}


def test_a_project_is_in_order_its_part_is_tested_and_it_knows_no_clone(empty):
    said = moecore("new", "own", ".")
    assert said.exit_code == 0 and said.stdout.startswith(".: begun from quick")
    assert "then `cd . && moecore run`, or `cd . && make repro`" in said.stdout
    assert files_below(empty) == WRITTEN and (empty / ".git").is_dir()
    assert moecore("check").exit_code == 0
    project = tomllib.loads((empty / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == [moecore_requirement()]
    files = WRITTEN - {"pyproject.toml"}  # which says where moecore was installed from
    texts = [(empty / file).read_text(encoding="utf-8") for file in files]
    assert not [text for text in texts if str(ROOT) in text or "my_study" in text or "../" in text]
    run_tests()
    assert experiment_name(empty) == "own" and find_project_root() == empty
    run = ROOT / ".runs/moge.swin.2"
    assert experiment_name(ROOT) == "moecore" and experiment_name(run) == "moge.swin.2"


@pytest.mark.parametrize("text", ["[", f"a = {'[' * 5_000}"])
def test_a_damaged_pyproject_is_one_line(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"pyproject\.toml: not valid TOML"):
        experiment_name(tmp_path)


@pytest.mark.parametrize("study", ("main", "quick", "ermoe/brain_age"))
def test_it_may_begin_as_any_study(empty, study):
    assert moecore("new", "own", "--from", study).exit_code == 0
    stages = check_params(empty / "own/params.yaml")
    assert stages.run.methods is not None and list_dvc_files(empty / "own")
    if study != "main":
        values = questions.find_question(ROOT, study).round(1).compose().document.data
        text = json.dumps(values).replace("../../data/", "data/")
        packages = ["own", *values.get("packages", ())]
        assert all(list((empty / "own/src" / name).glob("[a-z]*.py")) for name in packages)
        expected = json.loads(text) | {"packages": packages}
        if vmoe := expected.get("methods", {}).get("vmoe"):
            router = {"kind": "own.cosine", "k": vmoe["router"]["k"]}
            regularizers = [{"kind": "importance", "weight": 0.005}]
            expected["methods"]["cosine"] = vmoe | {"router": router, "regularizers": regularizers}
            expected["run"]["methods"].append("cosine")
        assert load_yaml_document(empty / "own/params.yaml").data == expected


WHEEL = "file:///home/wheels/moecore-0.9.1-py3-none-any.whl"
CLONE = "https://example.org/lab/moecore.git"


@pytest.mark.parametrize(
    ("recorded", "requirement"),
    [
        (None, "moecore>=0.9.1,<0.10"),  # pip records nothing of an index
        ({"url": WHEEL, "archive_info": {}}, f"moecore @ {WHEEL}"),
        (
            {"url": WHEEL, "archive_info": {"hash": "sha256=ab", "hashes": {"sha256": "ab"}}},
            f"moecore @ {WHEEL}#sha256=ab",
        ),
        (
            {"url": "file:///home/moecore", "dir_info": {"editable": True}},
            "moecore @ file:///home/moecore",
        ),
        (
            {
                "url": CLONE,
                "vcs_info": {"vcs": "git", "commit_id": "5ed6621", "requested_revision": "main"},
                "subdirectory": "code",
            },
            f"moecore @ git+{CLONE}@5ed6621#subdirectory=code",
        ),
        (
            {"url": "file:///home/moecore", "vcs_info": {"vcs": "git", "commit_id": "5ed6621"}},
            "moecore @ git+file://localhost/home/moecore@5ed6621",
        ),
    ],
)
def test_moecore_is_required_from_where_ours_came(tmp_path, monkeypatch, recorded, requirement):
    """As pip records it (PEP 610); of the name alone an index may have another package."""
    metadata = tmp_path / "moecore-0.9.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: moecore\nVersion: 0.9.1\n")
    if recorded is not None:
        (metadata / "direct_url.json").write_text(json.dumps(recorded))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert moecore_requirement() == requirement and Requirement(requirement).name == "moecore"


@pytest.mark.parametrize("origin", [f"git+{CLONE}@5ed6621", WHEEL])
def test_the_workflow_runs_where_the_requirement_can_be_installed(monkeypatch, origin):
    required = lambda: f"moecore @ {origin}"
    monkeypatch.setattr("moecore.pipeline.project_record.moecore_requirement", required)
    text = render_project_template("own", is_of_user=False)[".github/workflows/test.yml"]
    runner = parse_yaml_document(text).data["jobs"]["test"]["runs-on"]
    assert runner == ("self-hosted" if origin == WHEEL else "ubuntu-latest")


@pytest.mark.parametrize(
    ("study", "methods"),
    [
        ("tgr/table_3", ["vmoe"]),  # has no dense
        ("adversarial/autopgd", ["dense"]),  # has neither vmoe nor measurements
        ("ours/sizes", None),
    ],
)
def test_a_question_begins_with_what_the_project_has(empty, study, methods):
    moecore("new", "own", ".", "--from", study)
    begun = moecore("study", "new", "mine")
    if methods is None:
        assert begun.stderr == "params.yaml: methods: found none; allowed: a project with methods\n"
    else:
        assert load_yaml_document("pipelines/ours/mine.yaml").data["methods"] == methods


def test_an_overlay_is_written_again_by_the_same_command(empty):
    assert moecore("new", "own", "--from", "quick", "--overlay").exit_code == 0
    forget_package("own")  # as in a process of its own
    os.chdir("own")
    assert moecore("check").exit_code == 0
    methods = load_yaml_document("params.yaml").data["run"]["methods"]
    assert methods == ["dense", "vmoe", "told", "cosine"]
    before = {name: Path(name).read_text("utf-8") for name in ("params.yaml", "dvc.yaml")}
    assert moecore("study", "write").stdout == ""
    assert before == {name: Path(name).read_text("utf-8") for name in before}
    overlay = Path("overlay.yaml")
    overlay.write_text(overlay.read_text("utf-8").replace("epochs: 4", "epochs: 9"))
    assert moecore("study", "write").stdout == ".: pretrain.epochs: 4 → 9\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own", "full"], "full: is not empty; take an empty folder, or a name that is new"),
        (["Own"], "found the name 'Own'; allowed: small letters, digits and _"),
        (["import"], "found the name 'import'; allowed: small letters, digits and _"),
        (["moecore"], "found the name 'moecore', which Python finds already; allowed: another"),
        (["torch"], "found the name 'torch', which Python finds already; allowed: another"),
        (["own", "--from", "moge/swim"], "--from: found no question 'moge/swim', did you mean"),
        (["own", "--from", "dialects_new"], "--from: found 'dialects_new', an old name; it is no"),
        (["own", "--from", "main", "--overlay"], "--overlay: main has none"),
    ],
)
def test_what_is_not_in_order_is_one_line_and_writes_nothing(empty, words, said):
    (empty / "full").mkdir()
    (empty / "full/note.txt").write_text("mine")
    refused = moecore("new", *words)
    assert refused.exit_code == 1 and refused.stderr.startswith(said)
    assert refused.stderr.count("\n") == 1 and files_below(empty) == {"full/note.txt"}


def test_a_disk_that_is_full_leaves_no_half_project(empty, limited):
    with limited(1000):
        refused = moecore("new", "own", ".")
    assert refused.exit_code == 1 and refused.stderr.count("\n") == 1
    assert list(empty.iterdir()) == []


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        moecore("new", "own", ".")
        forget_package("own")
    return folder


def answer(files: dict[str, str] | None = None, **changes: str) -> None:
    """Change what the project here says of its beginning."""
    answers = json.loads(Path(PROJECT_ANSWERS_FILE).read_text(encoding="utf-8"))
    answers["files"] |= files or {}
    Path(PROJECT_ANSWERS_FILE).write_text(json.dumps(answers | changes), encoding="utf-8")


@pytest.fixture
def older(empty, begun) -> Path:
    """A project that an older version began, whose Makefile and .dvcignore were others."""
    shutil.copytree(begun, empty, dirs_exist_ok=True)
    for name in ("Makefile", ".dvcignore"):
        (empty / name).write_text("as it was\n", encoding="utf-8")
        answer({name: hash_text("as it was\n")}, moecore="0.0.1")
    return empty


def test_an_upgrade_shows_first_then_writes_and_leaves_what_the_user_edited(older):
    (older / ".dvcignore").write_text("mine\n", encoding="utf-8")
    pyproject = older / "pyproject.toml"
    now = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(re.sub('"moecore[^"]*', '"moecore>=0.0.1,<0.1', now), encoding="utf-8")
    before = {file: (older / file).read_text(encoding="utf-8") for file in WRITTEN}
    said = moecore("upgrade")
    assert said.exit_code == 0 and "\n-as it was\n+# Every target" in said.stdout
    assert ".dvcignore: edited in this project and stays so" in said.stdout
    assert said.stdout.endswith("nothing is written yet; to write it: moecore upgrade --yes\n")
    assert before == {file: (older / file).read_text(encoding="utf-8") for file in WRITTEN}
    assert moecore("upgrade", "--yes").stdout.endswith("written\n")
    changed = {file for file in WRITTEN if (older / file).read_text("utf-8") != before[file]}
    assert changed == {"Makefile", "pyproject.toml", PROJECT_ANSWERS_FILE}
    assert pyproject.read_text(encoding="utf-8") == now
    again = moecore("upgrade").stdout
    assert "@@" not in again and ".dvcignore" not in again, "it is said once"


def test_an_upgrade_writes_an_untouched_file_that_is_empty(older):
    answer({".dvcignore": hash_text("")})
    (older / ".dvcignore").write_text("", encoding="utf-8")
    assert "edited in this project" not in moecore("upgrade", "--yes").stdout
    assert (older / ".dvcignore").read_text(encoding="utf-8")


@pytest.mark.parametrize("study", ["quick", "main"])
def test_an_upgrade_keeps_the_stages_that_the_project_has(empty, monkeypatch, study):
    """A version began it whose ``quick`` had ``calibrate``, and ``main`` no ``transfer``."""
    monkeypatch.setattr("moecore.pipeline.project_files.print_plan", lambda: None)
    moecore("new", "own", ".", "--from", study)
    dvc, params = Path("dvc.yaml"), Path("params.yaml")
    stages = {*load_yaml_document(dvc).data["stages"], "calibrate"} - {"transfer"}
    text = dvc_yaml.study_dvc_yaml_texts(dvc_yaml.build_stage_entries([*stages]), {})["dvc.yaml"]
    dvc.write_text(text.replace("    desc: ", "    desc: Older. "), encoding="utf-8")
    settings = re.sub("(?m)^(transfer:|calibrate:\n ) .*\n", "", params.read_text("utf-8"))
    params.write_text(f"{settings}calibrate: {{calibrator: {{kind: temperature}}}}\n", "utf-8")
    answer({"dvc.yaml": hash_text(dvc.read_text("utf-8"))}, moecore="0.0.1")
    assert moecore("check").exit_code == 0
    assert moecore("upgrade", "--yes").stdout.endswith("written\n")
    assert {*load_yaml_document(dvc).data["stages"]} == stages
    assert "Older. " not in dvc.read_text("utf-8") and moecore("check").exit_code == 0


def test_an_upgrade_renames_keys_and_keeps_comments(older, monkeypatch):
    steps = (
        RenamedKey("0.0.1", "data", "never"),  # the project's own version
        RenamedKey("0.0.2", "methods.*.router.kind", "sort"),
        RenamedKey("0.1.0", "robustness.images", "pictures"),
    )
    monkeypatch.setattr("moecore.study.params_writer.RENAMED_KEYS", steps)
    monkeypatch.setattr("moecore.pipeline.project_files.print_plan", lambda: None)
    params = older / "params.yaml"
    text = params.read_text(encoding="utf-8") + "\n# the end\n"
    params.write_text(text, encoding="utf-8")
    assert moecore("upgrade", "--yes").exit_code == 0
    expected = text.replace("router: {kind:", "router: {sort:")
    expected = expected.replace("robustness:\n  images:", "robustness:\n  pictures:")
    assert params.read_text(encoding="utf-8") == expected
    params.write_text("robustness: {images: 1, pictures: 2}\n", encoding="utf-8")
    answer(moecore="0.0.1")
    refused = moecore("upgrade")
    said = "params.yaml: robustness.images is called pictures since moecore 0.1.0, and both are"
    assert refused.exit_code == 1 and refused.stderr.startswith(said)


def test_an_upgrade_removes_keys_that_are_gone():
    text = """\
pretrain:
  views:
    shift: 2
    size: 32

# of fine-tuning
routing: {augmentations: [{name: moved, views: {size: 2, shift: 1}}]}
"""
    expected = text.replace("    size: 32\n", "").replace("size: 2, ", "")
    assert rename_keys_in_text(text, RENAMED_KEYS, "params.yaml") == expected


def test_a_renamed_key_stays_in_its_place():
    text = "pretrain:\n  epochs: 2\n  batch: 8\n  learning_rate: 0.1\n"
    renamed = [RenamedKey("0.9.0", "pretrain.batch", "batch_size")]
    expected = text.replace("batch:", "batch_size:")
    assert rename_keys_in_text(text, renamed, "params.yaml") == expected


def test_a_project_of_a_newer_version_is_one_line(older):
    answer(moecore="9.1.0")
    for words in ("check", "upgrade", "run"):
        refused = moecore(words)
        assert refused.exit_code == 1 and refused.stderr.count("\n") == 1
        assert "the project is of moecore 9.1.0, newer than the installed" in refused.stderr
        assert refused.stderr.endswith("install moecore>=9.1.0,<9.2\n")
    Path(PROJECT_ANSWERS_FILE).write_text("<<<<<<< ours", encoding="utf-8")
    assert moecore("check").stderr.endswith("; restore it: git checkout .moecore.json\n")
    os.chdir("..")
    assert "found no such file; start from a folder of `moecore new`" in moecore("upgrade").stderr


def test_where_there_is_no_project_every_command_says_what_to_do_and_writes_nothing(empty):
    for words in ("check", "plan", "run", "study new own"):
        refused = moecore(*words.split())
        said = "params.yaml: cannot be read (no such file or directory); start from the folder that"
        assert refused.exit_code == 1 and refused.stderr.startswith(said), words
        assert refused.stderr.endswith("or begin a project: `moecore new my_study`\n")
    for words in ("schema", "study run own"):
        refused = moecore(*words.split())
        assert refused.exit_code == 1 and refused.stderr.count("\n") == 1, words
    assert list(empty.iterdir()) == []


def test_a_question_that_cannot_be_composed_leaves_no_file(empty):
    shutil.copy(ROOT / "tests/params.yaml", "params.yaml")
    text = Path("params.yaml").read_text(encoding="utf-8")
    Path("params.yaml").write_text(text.replace("patch: 7", "patch: x", 1), encoding="utf-8")
    assert moecore("study", "new", "own").exit_code == 1
    assert not Path("pipelines/ours/own.yaml").exists()


def test_a_project_of_an_older_version_knows_its_study(older, monkeypatch):
    monkeypatch.setattr("moecore.pipeline.project_files.print_plan", lambda: None)
    answer(study="dialects_new")
    Path("dvc.yaml").unlink()  # its stages would stay
    said = moecore("upgrade")
    assert said.exit_code == 0 and "finetune" in said.stdout, "dvc.yaml is that of the question"


def test_the_parts_that_docs_show_run_as_shown(empty, monkeypatch):
    monkeypatch.setattr("moecore.pipeline.project_files.print_plan", lambda: None)
    text = (ROOT / "docs/tutorials/own_parts.md").read_text(encoding="utf-8")
    page = text.replace("my_study", "own")
    moecore("new", "own", ".")
    for file, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.M | re.S):
        Path(file).write_text(code, encoding="utf-8")
    params = load_yaml_document("params.yaml").data
    for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S):
        for name, section in parse_yaml_document(block).data.items():
            params.setdefault(name, {}).update(section)
    Path("params.yaml").write_text(params_writer.dump_inline_yaml(params), encoding="utf-8")
    command = "moecore upgrade --yes --stage calibrate"
    refused = moecore("check").stderr
    assert refused.count("\n") == 1 and f"`{command}`" in refused and f"`{command}`" in page
    assert moecore(*command.split()[1:]).stdout.endswith("written\n")
    assert moecore("upgrade").stdout.endswith("and nothing is to be written again\n")
    assert moecore("check").stdout in page
    run_tests("test_parts.py")
    assert "found calibrat; allowed: code, " in moecore("upgrade", "--stage", "calibrat").stderr


OLD = {  # name → (commit, what its metadata said)
    "0.1.0": ("ac0663af", "0.1.0"),
    "25_november": ("7189a9c2", "0.2.0"),
    "0.2.0": ("0c36ca83", "0.2.0"),
}
FILES = ("moecore", "stages", "pipelines", "params.yaml", "dvc.yaml")
BEGIN = """
import os
from moecore.pipeline.cli import app
app(["new", "own"], standalone_mode=False)
os.chdir("own")
app(["schema"])
"""


@pytest.fixture(scope="module", params=OLD)
def old(request, tmp_path_factory) -> Path:
    """A project that the code of this commit began, from ``quick``, with its schema."""
    commit, version = OLD[request.param]
    home = tmp_path_factory.mktemp("old")
    source = home / "source"
    archive = ["git", "archive", "-o", str(home / "source.tar"), commit, *FILES]
    if subprocess.run(archive, cwd=ROOT, capture_output=True).returncode:
        pytest.skip("git has no history here, or a part of it")
    source.mkdir()
    subprocess.run(["tar", "-xf", home / "source.tar", "-C", source], check=True)
    metadata = source / f"moecore-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: moecore\nVersion: {version}\n", "utf-8")
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN], cwd=home, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return home / "own"


def test_an_upgraded_project_is_in_order_with_the_stages_that_it_had(old, monkeypatch):
    monkeypatch.chdir(old)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("moecore.pipeline.project_files.print_plan", lambda: None)
    stages = {*load_yaml_document(Path("dvc.yaml")).data["stages"]}
    forget_package("own")
    for words in (["upgrade", "--yes"], ["check"], ["study", "new", "mine"]):
        done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    forget_package("own")
    assert {*load_yaml_document(Path("dvc.yaml")).data["stages"]} == stages


def list_keys(
    schema: Mapping[str, Any], node: Any, above: tuple[str, ...] = (), used: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key that a schema knows; parts of a family share their paths."""
    if reference := node.get("$ref", "").removeprefix("#/$defs/"):
        if reference not in used:
            yield from list_keys(schema, schema["$defs"][reference], above, (*used, reference))
        return
    for entry in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from list_keys(schema, entry, above, used)
    for name, entry in node.get("properties", {}).items():
        yield (*above, name)
        yield from list_keys(schema, entry, (*above, name), used)
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from list_keys(schema, node[name], (*above, "*"), used)


def test_every_key_of_then_is_a_key_of_now_or_is_renamed(old):
    then, now = json.loads((old / "params.schema.json").read_text("utf-8")), check.params_schema()
    gone = {*list_keys(then, then)} - {*list_keys(now, now)}
    known = {step.key for step in RENAMED_KEYS}
    assert not {".".join(path) for path in gone if path[0] not in MADE_CALCULATIONS} - known
    assert known <= {".".join(path) for path in gone}, "no key is in the list in vain"
