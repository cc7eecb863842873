"""What an edit makes stale; what each stage needs; imports and fingerprints; the stage ``code``."""

import ast
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.core.files import UserError, read_json
from moecore.core.source_layout import HASHES_DIR, ROOT, refuse_other_checkout
from moecore.pipeline import code_hashes
from moecore.pipeline.code_hashes import compute_code_hashes
from moecore.run.history_file import read_dvc_locks
from moecore.study.stages import CODE_STAGE
from moecore.study.yaml_document import load_yaml_document
from tests.project import COMMAND, Project, forget_files

METHODS = ("dense", "vmoe", "tgr")


@pytest.fixture(scope="module")
def project(finished, tmp_path_factory) -> Project:
    return finished.copy(tmp_path_factory.mktemp("reruns") / "project")


@pytest.fixture
def edited(project) -> Iterator[Project]:
    """The project, whose code and params are put back after the test."""
    yield project
    for name in ("moecore", "stages", "conformance"):
        shutil.rmtree(project.folder / name)
    project.copy_code()
    project.write()


def edit(project: Project, file: str, more: str = "\nEDITED = True\n") -> None:
    path = project.folder / file
    path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")


def of_method(stage: str, *methods: str) -> bool:
    return any(method in stage.partition("@")[2].split("-") for method in methods)


def changed_stages(project: Project) -> set[str]:
    """The stages whose code an edit changed, by the hashes and dvc.lock: DVC is not asked."""
    forget_files()
    hashes = compute_code_hashes(load_yaml_document(project.folder / "params.yaml"), project.folder)
    files = [HASHES_DIR / name for name in hashes]
    before = {file: read_json(project.folder / file) for file in files}
    changed = [
        file for file in files if before[file] != hashes[file.relative_to(HASHES_DIR).as_posix()]
    ]
    locks = read_dvc_locks(project.folder)
    uses = [(stage, Path(dep["path"])) for stage in locks for dep in locks[stage].get("deps", ())]
    return {stage for stage, dep in uses if any(file.is_relative_to(dep) for file in changed)}


def test_what_decides_no_result_and_wording_rerun_nothing(edited, monkeypatch):
    """DVC is asked: of new statements above the rooms that decide, of other words everywhere."""
    monkeypatch.setattr(edited, "forked", False)  # a fork hashes what its server was started from
    assert edited.stale() == {}
    for file in sorted((edited.folder / "moecore").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if ast.get_docstring(tree):
            tree.body[0] = ast.Expr(ast.Constant("Other words."))
        text = f"# edited\n{ast.unparse(tree)}\n"
        if file.relative_to(edited.folder).parts[1] in ("study", "run", "tracking", "pipeline"):
            text += "EDITED = True\n"
        file.write_text(text, encoding="utf-8")
    assert edited.repro() == [CODE_STAGE] and edited.changed_by_dvc() == set()


def test_a_figure_or_a_column_reruns_compare_alone(edited):
    for file in sorted((edited.folder / "moecore/report").rglob("*.py")):
        edit(edited, str(file.relative_to(edited.folder)))
    assert changed_stages(edited) == {"compare"}


@pytest.mark.parametrize(
    ("file", "rerun", "others"),
    [
        ("nn/routers/noisy_top_k.py", {"pretrain@vmoe-0", "pretrain@tgr-0"}, ("dense",)),
        (
            "training/regularizers/router_kl.py",
            {"teacher_router@tgr-0", "pretrain@tgr-0", "finetune@tgr-0"},
            ("dense", "vmoe"),
        ),
    ],
)
def test_a_part_reruns_the_methods_that_use_it(edited, file, rerun, others):
    edit(edited, f"moecore/{file}")
    changed = changed_stages(edited)
    assert rerun <= changed and not [stage for stage in changed if of_method(stage, *others)]


def test_new_files_rerun_nothing(edited):
    for family, part, new in (
        ("moecore/nn/routers", "hash", "Hash"),
        ("moecore/training/regularizers", "z_loss", "ZLoss"),
        ("moecore/data/sources", "digits", "Digits"),
        ("moecore/attacks", "fgsm", "Fgsm"),
    ):
        folder = edited.folder / family
        text = (folder / f"{part}.py").read_text(encoding="utf-8")
        (folder / "another.py").write_text(text.replace(part, "another").replace(new, "Another"))
    assert changed_stages(edited) == set()


def test_settings_rerun_what_reads_them(edited):
    """DVC is asked: of a method's weight, of a new method, of a new seed."""
    edited.edit("{kind: router_kl, weight: 5.0}", "{kind: router_kl, weight: 4.0}")
    stale = set(edited.stale())
    assert {"pretrain@tgr-0", "finetune@tgr-0", "transfer@finetune-0", "compare"} <= stale
    assert not [stage for stage in stale if of_method(stage, "dense", "vmoe")]
    edited.write()
    edited.edit("methods: [dense, vmoe, tgr]", "methods: [dense, vmoe, tgr, other]")
    stale = set(edited.stale())
    assert {"teacher_router@other-0", "pretrain@other-0", "transfer@finetune-0", "compare"} <= stale
    assert not [stage for stage in stale if of_method(stage, *METHODS)]
    edited.write()
    edited.edit("seeds: [0]", "seeds: [0, 1]")
    stale = set(edited.stale())
    assert {f"pretrain@{method}-1" for method in METHODS} <= stale
    again = {stage for stage in stale if stage.endswith("-0")}
    assert again <= {"transfer@finetune-0"}, "it lists the folder of all seeds"


def copy_dependencies(finished: Project, stage: str, folder: Path) -> Path:
    entry = read_dvc_locks(finished.folder)[stage]
    for path in {"params.yaml", "dvc.yaml", *(entry["path"] for entry in entry["deps"])}:
        source, target = finished.folder / path, folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    return folder


# Runs every stage in a process and a folder of its own: which files' functions does it call?
TRACE = """
import cProfile, json, os, sys, threading
from moecore.run.stage_entry import run_stage
from moecore.stages.fork_server import STAGES as stages
for name, (script, *words) in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if pid == 0:
        os.chdir(f"{sys.argv[2]}/{name}")
        codes = set()
        threading.setprofile(lambda frame, *_: codes.add(frame.f_code))
        profile = cProfile.Profile(builtins=False)
        profile.runcall(run_stage, stages[script], words)
        codes |= {entry.code for entry in profile.getstats()}
        # of functions, not of modules and classes
        used = {code.co_filename for code in codes if code.co_flags & 1}
        with open(f"{sys.argv[2]}/{name}.json", "w") as file:
            json.dump(sorted(used), file)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


@pytest.fixture(scope="module")
def used(finished, tmp_path_factory) -> dict[str, set[str]]:
    """The source files whose functions each stage calls, run where only its dependencies are."""
    folder = tmp_path_factory.mktemp("used")
    start = "python -m moecore.stages."
    locks = {
        name: entry
        for name, entry in read_dvc_locks(finished.folder).items()
        if entry["cmd"].startswith(start) and name != CODE_STAGE
        if not of_method(name, "dense", "vmoe") or name == "pretrain@dense-0"
    }
    words = {}
    for name, entry in locks.items():
        copy_dependencies(finished, name, folder / name)
        words[name] = entry["cmd"].removeprefix("python -m moecore.stages.").split()
    bare = {"PYTHONDONTWRITEBYTECODE": "1"}
    finished.run([sys.executable, "-c", TRACE, json.dumps(words), str(folder)], bare)
    for name, entry in locks.items():
        outs = [folder / name / out["path"] for out in entry["outs"]]
        assert [path for path in outs if not path.exists()] == [], name
    home = f"{finished.folder}/"
    files = {name: json.loads((folder / f"{name}.json").read_text()) for name in words}
    ours = f"{home}moecore/"
    return {
        name: {file.removeprefix(home) for file in called if file.startswith(ours)}
        for name, called in files.items()
    }


def depends_on(project: Project) -> dict[str, set[str]]:
    """The source files whose edit changes what a stage depends on, by dvc.lock and the hashes."""
    files = (project.folder / "artifacts/code").rglob("*.json")
    hashes = {path: set(json.loads(path.read_text())) for path in files}
    known = {}
    for name, entry in read_dvc_locks(project.folder).items():
        deps = [project.folder / dep["path"] for dep in entry.get("deps", ())]
        hashed = [path for dep in deps for path in hashes if path.is_relative_to(dep)]
        known[name] = set().union(*(hashes[path] for path in hashed))
    return known


def decides(file: str) -> bool:
    return file.split("/")[1] in ("stages", *code_hashes.DECIDING)


def test_a_stage_depends_on_all_code_that_it_runs(finished, used):
    known = depends_on(finished)
    ran = {name: {file for file in files if decides(file)} for name, files in used.items()}
    lacking = {name: sorted(files - known[name]) for name, files in ran.items()}
    missing = {name: files for name, files in lacking.items() if files}
    assert missing == {}


def draw_files(project: Project, number: int) -> list[str]:
    """Files of all rooms, of those that decide a result twice as often."""
    draw = random.Random(int(os.environ.get("MOECORE_SOAK_SEED", "0")))
    paths = sorted((project.folder / "moecore").glob("*/**/[a-z]*.py"))
    files = [path.relative_to(project.folder).as_posix() for path in paths]
    rooms = sorted({file.split("/")[1] for file in files})
    others = [room for room in rooms if room not in code_hashes.DECIDING]
    drawn = draw.sample(code_hashes.DECIDING * 4, number - number // 3)
    drawn += draw.sample(others * 4, number // 3)
    return [
        draw.choice([file for file in files if file.startswith(f"moecore/{room}/")])
        for room in drawn
    ]


def test_an_edit_reruns_what_uses_the_file_and_nothing_else(edited, used, monkeypatch):
    """By the hashes; ``make soak`` asks DVC too, of thirty files."""
    soak = "MOECORE_SOAK" in os.environ
    known = depends_on(edited)
    monkeypatch.setattr(edited, "forked", False)  # a fork hashes what its server was started from
    for file in draw_files(edited, 30 if soak else 10):
        before = (edited.folder / file).read_text(encoding="utf-8")
        edit(edited, file)
        changed = changed_stages(edited)
        using = {name for name, called in used.items() if file in called and decides(file)}
        assert using <= changed, f"{file}: used, but not run again"
        assert changed == {name for name, sources in known.items() if file in sources}, file
        room = file.split("/")[1]
        if room not in code_hashes.DECIDING:
            assert changed <= ({"compare"} if room == "report" else set()), file
        if soak:
            edited.run(["dvc", "repro", "--single-item", CODE_STAGE])
            assert edited.changed_by_dvc() - {"numbers"} == changed, file
        (edited.folder / file).write_text(before, encoding="utf-8")
        if soak:
            edited.run(["dvc", "repro", "--single-item", CODE_STAGE])


def test_code_of_another_checkout_is_refused_and_never_runs(tmp_path):
    """By the command and by every stage, in its root and in its studies."""
    project = Project(tmp_path)
    study = tmp_path / ".runs/own.one"
    study.mkdir(parents=True)
    refuse_other_checkout(study)  # the same code
    edit(project, "moecore/nn/routers/hash.py")
    refused = project.attempt_stage("code")
    said = f"{tmp_path}: has other code of moecore than {ROOT}, which would run here"
    assert refused.returncode == 1 and said in refused.stderr
    command = [sys.executable, "-P", "-c", COMMAND, "check"]  # as the script `moecore`
    refused = project.attempt(command, {"PYTHONPATH": str(ROOT)})
    assert refused.returncode == 1 and refused.stderr.startswith(said)
    with pytest.raises(UserError, match="has other code"):
        refuse_other_checkout(study)
    project.run(command)
