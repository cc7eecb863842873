"""Parts that lack something, through `moecore check` in copies of the project: named, and what.

Every copy has one part as the README says, ``my_part.py`` and a line in ``__init__.py``.
"""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.study.assign import assign, assigned
from moecore.study.contracts import CONTRACTS, lacks, lacks_of_measurement
from moecore.study.document import parse
from moecore.study.parts import LOADED, check_parts
from moecore.tasks.base import Task
from tests.project import PARAMS, ROOT, Project
from tests.study.part_cases import CASES, HEAD, Case

# Forked from one process that has imported torch, which takes most of the time of each check.
COMMANDS = """\
import os, sys
import numpy, pydantic, torch, typer

for folder in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(folder)
        sys.path.insert(0, folder)
        for stream in (1, 2):
            os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        from moecore.pipeline.cli import app
        sys.argv[1:] = ["check"]
        app()
    _, status = os.waitpid(child, 0)
    with open(folder + "/code.txt", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and output of `moecore check` in each case's copy of the project."""
    folders = {}
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp("part")
        Project(folder, PARAMS.replace(*case.edit) if case.edit[0] else PARAMS)
        write(folder, case)
        folders[name] = folder
    words = [sys.executable, "-c", COMMANDS, *map(str, folders.values())]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr
    return {
        name: (int((folder / "code.txt").read_text()), (folder / "said.txt").read_text())
        for name, folder in folders.items()
    }


def write(folder: Path, case: Case) -> None:
    """The part's file, and its line in the family."""
    family = folder / "moecore" / case.family
    (family / "my_part.py").write_text(HEAD + case.body, encoding="utf-8")
    if not case.listed:
        return
    init = family / "__init__.py"
    text = init.read_text(encoding="utf-8")
    dotted = f"moecore.{case.family.replace('/', '.')}"
    if case.family == "measure":
        new = 'MEASUREMENTS = {\n    "my_part": Measurement.of(my_part, my_part.MyPart),'
        text = text.replace("MEASUREMENTS = {", f"from {dotted} import my_part\n\n{new}", 1)
    else:
        union = re.sub(r"\n(\w+) = Annotated\[\s*", r"\n\1 = Annotated[MyPart | ", text, count=1)
        assert union != text
        text = union.replace(
            "\nfrom moecore", f"\nfrom {dotted}.my_part import MyPart\nfrom moecore", 1
        )
    init.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_what_a_part_lacks_is_said(checked, name):
    code, said = checked[name]
    case = CASES[name]
    assert code == 1 and "Traceback" not in said, said
    lines = said.splitlines()
    assert len(lines) >= len(case.said), said
    for pattern, line in zip(case.said, lines, strict=False):
        assert re.match(pattern.replace("{}", case.family), line), f"{pattern}\n{said}"


def test_every_family_has_a_contract_that_ours_meet():
    check_parts()
    assert set(CONTRACTS) == set(LOADED)
    assert {case.family for case in CASES.values()} == {*CONTRACTS, "measure"}


def test_what_is_no_settings_is_said():
    class Bare:
        pass

    assert "is no settings; allowed: a class on moecore.core.config.Config" in next(
        lacks(Bare, "attacks")
    )
    one = next(iter(LOADED["tasks"]()))
    assert not list(lacks(one, "tasks"))
    assert callable(lacks_of_measurement)


def test_the_contract_of_a_task_asks_for_what_its_protocol_declares():
    contract = CONTRACTS["tasks"]
    declared = {name: value for name, value in vars(Task).items() if not name.startswith("_")}
    properties = {name for name, value in declared.items() if isinstance(value, property)}
    assert set(contract.values) == properties - {"kind"}  # every part has a kind
    assert set(contract.calls) == set(declared) - properties
    for name, words in contract.calls.items():
        asked = list(inspect.signature(getattr(Task, name)).parameters)
        assert tuple(word for word in asked if word != "self") == words, name


TEXT = """\
# the head
run: {methods: [a, b], seeds: [0]}  # names
pretrain:
  epochs: 2   # short
  views: {shift: 1}
parts:
  - {kind: one, weight: 1}
  - &two {kind: two, weight: 2}
again: *two
"""


def of(text: str, *assignments: str) -> str:
    for assignment in assignments:
        text = assigned(parse(text), text, assignment)
    return text


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        ("pretrain.epochs=3", "epochs: 2   # short", "epochs: 3   # short"),
        ("run.methods=[a]", "{methods: [a, b], seeds", "{methods: [a], seeds"),
        ("parts.0.weight=0.5", "{kind: one, weight: 1}", "{kind: one, weight: 0.5}"),
        ("pretrain.views.flip=true", "{shift: 1}", "{flip: true, shift: 1}"),
        ("pretrain.batch=8", "  epochs: 2", "  batch: 8\n  epochs: 2"),
        ("new={x: 1}", "run: {methods", "new: {x: 1}\nrun: {methods"),
    ],
)
def test_one_value_changes_and_all_else_stays(assignment, before, after):
    assert TEXT.count(before) == 1
    assert of(TEXT, assignment) == TEXT.replace(before, after)


def test_a_block_is_replaced_whole():
    assert parse(of(TEXT, "pretrain={epochs: 1}")).data["pretrain"] == {"epochs": 1}
    assert "# the head" in of(TEXT, "pretrain={epochs: 1}")


@given(st.integers() | st.booleans() | st.lists(st.integers(), max_size=3), st.integers(1, 4))
def test_the_last_of_several_assignments_holds(value, times):
    text = of(TEXT, *(f"pretrain.epochs={n}" for n in range(times)), f"pretrain.epochs={value}")
    expected = parse(TEXT).data
    expected["pretrain"]["epochs"] = value
    assert parse(text).data == expected


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("epochs", "expected key=value, such as pretrain.epochs=3"),
        ("pretrain.epochs=", "expected key=value"),
        (
            "pretrain.epoch.x=1",
            "found 'epoch' in pretrain, did you mean 'epochs'?; allowed: epochs",
        ),
        ("parts.2.weight=1", "found '2' in parts; allowed: 0, 1"),
        ("pretrain.epochs.x=1", "found 'x' in pretrain.epochs; allowed: nothing"),
        ("pretrain.epochs=[1", "not valid YAML"),
        ("again=1", "again: shares its value with other keys"),
        ("again.weight=3", "again.weight: shares its value with other keys; edit the file itself"),
    ],
)
def test_what_cannot_be_written_is_said(assignment, said):
    with pytest.raises(UserError) as error:
        of(TEXT, assignment)
    assert said in str(error.value)


def test_the_file_is_checked_and_left_as_it_was_where_it_is_not_in_order(tmp_path):
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    path = tmp_path / "params.yaml"
    before = PARAMS
    path.write_text(before, encoding="utf-8")
    with pytest.raises(UserError) as error:
        assign(path, ["run.seeds=[0, 1]", "pretrain.epochs=none"])
    assert "pretrain.epochs" in str(error.value) and "left as it was" in str(error.value)
    assert path.read_text(encoding="utf-8") == before
    assert assign(path, ["run.seeds=[0, 1]"]) == ["run.seeds: [0] → [0, 1]"]
    assert path.read_text(encoding="utf-8") == before.replace("seeds: [0]\n", "seeds: [0, 1]\n")
