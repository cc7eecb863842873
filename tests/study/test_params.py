"""params.yaml: YAML 1.2, exact places, every problem at once.

The table of sections says what the scripts read, and the model of the whole has their types.

Parts that lack something, through `moecore check` in copies of the project: named, and what.
Every copy has one part as the README says, ``my_part.py`` and a line in ``__init__.py``.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.study.assign import assign, assigned
from moecore.study.contracts import CONTRACTS, lacks, lacks_of_measurement
from moecore.study.document import load, parse
from moecore.study.mistakes import cut
from moecore.study.params import Key, check, keys, read
from moecore.study.parts import LOADED, check_parts
from moecore.study.problems import spell
from moecore.study.slots import Slot, resolve
from moecore.study.study import MEASURED, SECTIONS, Study
from tests.project import PARAMS, Project
from tests.study.part_cases import CASES, HEAD, Case


class NoisyTopK(Config):
    kind: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(2, ge=1)
    noise: float | None = Field(None, gt=0, le=1)
    activation: Literal["relu", "gelu"] = "relu"


class Load(Config):
    """Has a field named like its tag."""

    kind: Literal["load"] = "load"
    load: float = Field(0.1, ge=0)


Router = Annotated[NoisyTopK | Load, Field(discriminator="kind")]


class Method(Config):
    router: Router | None = None
    parts: tuple[Router, ...] = ()
    width: int | Literal["auto"] = 3

    @model_validator(mode="after")
    def _not_four(self) -> "Method":
        if self.width == 4:
            raise ValueError("width 4 does not fit")
        return self


class Params(Config):
    epsilons: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    flag: bool = False
    method: Annotated[Method, Key("methods.{method}")]


def problems(text: str, **item: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(Params, text, "params.yaml", **({"method": "vmoe"} | item))
    return str(caught.value).split("\n")


def test_yaml_1_2():
    text = (
        "{a: 1e-4, b: no, c: on, d: yes, e: 010, f: 0o17, g: 0x1F, h: true, i: False, j: ~, "
        "k: 2020-01-01, l: .inf, m: 1.5E3, n: '12:30', o: -.5, p: '1'}"
    )
    assert parse(text).data == {
        "a": 1e-4,
        "b": "no",
        "c": "on",
        "d": "yes",
        "e": 10,
        "f": 15,
        "g": 31,
        "h": True,
        "i": False,
        "j": None,
        "k": "2020-01-01",
        "l": float("inf"),
        "m": 1500.0,
        "n": "12:30",
        "o": -0.5,
        "p": "1",
    }
    assert isinstance(parse("1e3").data, float)
    assert parse("at: 12:30").data == {"at": "12:30"}


def test_merge_keys_and_their_places():
    document = parse("base: &b {k: 1, l: 2}\nm: {<<: *b, k: 5}\n")
    assert document.data["m"] == {"k": 5, "l": 2}
    assert document.place(["m", "k"]) == "params.yaml:2:13"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2",
            "params.yaml:5:3: key 'c' is written twice, first on line 3; keep one\n"
            "params.yaml:6:1: key 'a' is written twice, first on line 1",
        ),
        ("a: [1\nb: 2", "params.yaml:2:2: not valid YAML"),
        ("a: !!python/object:os.system x", "params.yaml:1:4: not valid YAML"),
        ("a: &x [*x]", "contains itself"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a:\n\tb: 1", "params.yaml:2:1: not valid YAML"),
        ("{at: 12:30}", "params.yaml:1:8: not valid YAML"),  # DVC's parser refuses it too
        ("a: !!int x", "params.yaml:1:4: not valid YAML: 'x' is not an integer"),
        ("a: !!bool x", "params.yaml:1:4: not valid YAML: 'x' is not true or false"),
        ("\x00", "params.yaml: not valid YAML"),
        ("a: 1\n? [a, b]\n: 1\n", "params.yaml:2:3: found a list as a key; allowed: a word"),
        ("a:\n  ? {a: b}\n  : 1\n", "params.yaml:2:5: found a mapping as a key"),
        ("? &k [a]\n: 1\n? *k\n: 2\n", "params.yaml:1:3: found a list as a key"),
        (f"a: 0x{'f' * 5000}", "params.yaml:1:4: not valid YAML: '0xff"),
        (f"a: 0o{'7' * 6000}", "is not an integer of up to 255 letters, it has 6,002"),
        (f"a: -{'9' * 400}", "is not an integer of up to 255 letters, it has 401"),
        (f"? {'k' * 5000}\n: 1", "params.yaml:1:3: found a word of 5000 letters"),
        ('"a\\0b": 1', "params.yaml:1:1: found a text with the character NUL"),
        (f"a: [{'1,' * 200_000}1]", "found more than 100,000 values; allowed: fewer"),
        (f"a: [{'[],' * 200_000}1]", "found more than 100,000 values; allowed: fewer"),
    ],
    ids=lambda text: text[:20].encode("unicode_escape").decode(),
)
def test_faults_of_the_text_have_a_place(text, expected):
    with pytest.raises(UserError) as caught:
        parse(text)
    assert expected in str(caught.value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
        max_leaves=8,
    )
)
def test_json_is_yaml(value):
    import json

    assert (
        parse(json.dumps(value)).data == value
        or value == float("inf")
        or "Infinity" in json.dumps(value)
    )


def test_reads_exactly_what_is_declared(tmp_path, monkeypatch):
    path = tmp_path / "other.yaml"
    path.write_text(
        "epsilons: [0, 1e-4, 1]\nunrelated: {is: [not, looked, at]}\n"
        "methods: {vmoe: {router: {kind: load}}, broken: 5}\n"
    )
    monkeypatch.setenv("MOECORE_PARAMS", str(path))
    params = read(Params, method="vmoe")
    assert params.epsilons == (0.0, 1e-4, 1.0) and params.method.router == Load()
    assert keys(Params) == {"epsilons": "epsilons", "flag": "flag", "method": "methods.{method}"}


def test_every_problem_with_place_key_found_allowed():
    text = """\
epsilons: [0, 2, x]
flag: no
methods:
  vmoe:
    router:
      kind: noisy_top_k
      k: two
      noise: -1
      activation: gleu
      kk: 3
    parts: [{kind: load, load: -1}, {kind: laod}, {k: 3}, 5]
    width: x
"""
    assert problems(text) == [
        "params.yaml:1:15: epsilons[1]: found 2 (int); allowed: number ≥ 0 and ≤ 1",
        "params.yaml:1:18: epsilons[2]: found 'x' (str); allowed: number ≥ 0 and ≤ 1",
        "params.yaml:2:1: flag: found 'no' (str); allowed: true or false",
        "params.yaml:7:7: methods.vmoe.router.k: found 'two' (str); allowed: integer ≥ 1",
        "params.yaml:8:7: methods.vmoe.router.noise: found -1 (int); "
        "allowed: number > 0 and ≤ 1 or null",
        "params.yaml:9:7: methods.vmoe.router.activation: found 'gleu' (str), "
        "did you mean 'gelu'?; "
        "allowed: one of relu, gelu",
        "params.yaml:10:7: methods.vmoe.router.kk: unknown key, did you mean 'k'?; "
        "allowed: kind, k, noise, activation",
        "params.yaml:11:26: methods.vmoe.parts[0].load: found -1 (int); allowed: number ≥ 0",
        "params.yaml:11:37: methods.vmoe.parts[1]: found kind: laod, did you mean 'load'?; "
        "allowed: noisy_top_k, load",
        "params.yaml:11:51: methods.vmoe.parts[2]: kind is missing; allowed: "
        "kind: noisy_top_k | load",
        "params.yaml:11:59: methods.vmoe.parts[3]: found 5 (int); allowed: "
        "keys with kind: noisy_top_k | load",
        "params.yaml:12:5: methods.vmoe.width: found 'x' (str); allowed: integer or auto",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "epsilons: [0]\nmethods: {vmoe: {width: 4}}",
            "params.yaml:2:11: methods.vmoe: width 4 does not fit",
        ),
        (
            "epsilons: ['0']\nmethods: {vmoe: {}}",
            "params.yaml:1:12: epsilons[0]: found '0' (str); allowed: number ≥ 0 and ≤ 1",
        ),
        (
            "epsilons: [0]\nflag: 1\nmethods: {vmoe: {}}",
            "params.yaml:2:1: flag: found 1 (int); allowed: true or false",
        ),
        (
            "epsilons: [.nan]\nmethods: {vmoe: {}}",
            "params.yaml:1:12: epsilons[0]: found NaN (float); allowed: number ≥ 0 and ≤ 1",
        ),
        (
            "epsilons: [0]\nmethods: {vmeo: {}}",
            "params.yaml:2:1: methods.vmoe: missing, did you mean 'vmeo'?; methods has: vmeo",
        ),
        ("methods: {vmoe: {}}", "params.yaml:1:1: epsilons: missing; the file has: methods"),
        (
            "epsilons: [0]\nmethods: {vmoe: {router: {kind: noisy_top_k, k: 2.0}}}",
            "params.yaml:2:46: methods.vmoe.router.k: found 2.0 (float); allowed: integer ≥ 1",
        ),
        (
            "epsilons: [0]\nmethods: {vmoe: }",
            "params.yaml:2:11: methods.vmoe: found null; allowed: the keys router, parts, width",
        ),
    ],
)
def test_single_problems(text, expected):
    assert problems(text) == [expected]


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match="nowhere.yaml: cannot be read"):
        read(Params, "nowhere.yaml", method="vmoe")


@pytest.mark.parametrize("levels", [5, 20])
def test_aliases_of_ancestors_are_found_at_once(levels):
    """Every simple path through these is a factorial of them."""
    text = "x"
    for level in reversed(range(levels)):
        above = "".join(f"*a{one}, " for one in range(level + 1))
        text = f"&a{level} [{above}{text}]"
    every = ", ".join(f"*a{one}" for one in range(levels))
    with pytest.raises(UserError, match="contains itself through an alias"):
        parse(f"z: {text}\ny: [{every}]\n")


def test_what_is_no_file_of_text_is_said(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(UserError, match=r"params.yaml:2:4: not UTF-8 text \(byte 8\)"):
        load(str(path))
    path.write_bytes(b"#" * 10_000_001)
    with pytest.raises(UserError, match="found more than 10,000,000 bytes"):
        load(str(path))
    path.unlink()
    os.mkfifo(path)
    for pipe in (str(path), "/dev/zero"):
        with pytest.raises(UserError, match="found a pipe or a device"):
            load(pipe)


def test_a_line_is_a_line_and_no_longer_than_a_screen():
    assert spell(("a\nb\u2028", 0, "c" * 200)) == rf"a\nb\u2028[0].{'c' * 28}...{'c' * 28}"
    assert cut(["p:1:1: a"] * 20) == "\n".join(["p:1:1: a"] * 20)
    lines = cut(["p:1:1: a"] * 10_000).split("\n")
    assert len(lines) == 21 and lines[-1] == "p: and 9,980 more; mend these first"


def test_imports_are_light():
    import subprocess
    import sys

    code = (
        "import sys, moecore.study.params, moecore.run.history, moecore.run.progress, "
        "moecore.run.stage; assert not {'torch', 'mlflow', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SCRIPTS = sorted(path.stem for path in (ROOT / "stages").glob("[a-z]*.py"))


def params_of(script: str) -> type | None:
    return getattr(importlib.import_module(f"stages.{script}"), "Params", None)


READERS = [name for name in SCRIPTS if name in SECTIONS and params_of(name) is not None]


@pytest.mark.parametrize("script", READERS)
def test_a_stage_reads_the_sections_that_the_table_names(script):
    read = {key.split(".")[0] for key in keys(params_of(script)).values()}
    assert read == set(SECTIONS[script])


@pytest.mark.parametrize("script", READERS)
def test_the_whole_has_the_types_of_the_parts(script):
    params = params_of(script)
    for name, key in keys(params).items():
        if key in Study.model_fields:
            whole = resolve(Slot.of(Study.model_fields[key]))
            part = resolve(Slot.of(params.model_fields[name]))
            assert whole.annotation == part.annotation
            assert whole.discriminator == part.discriminator


def test_every_section_is_known():
    named = {section for sections in SECTIONS.values() for section in sections}
    assert named | set(MEASURED) == set(Study.model_fields)


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
