"""params.yaml: YAML 1.2, exact places, every problem at once.

The table of sections says what the scripts read, and the model of the whole has their types.
"""

import importlib
from typing import Annotated, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.study.document import parse
from moecore.study.params import Key, check, keys, read
from moecore.study.slots import Slot, resolve
from moecore.study.study import MEASURED, SECTIONS, Study


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
    ],
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
