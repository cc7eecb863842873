import importlib
import json
import subprocess
import sys
from typing import Annotated, Any, Literal, get_args

import pytest
from dvc.utils.serialize import YAMLFileCorruptedError, parse_yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from moecore.core import config, files, source_layout
from moecore.study import params_layers, params_reader, stages, yaml_document
from moecore.study.params_reader import params_keys_by_field, read_stage_params
from moecore.study.study import MEASURED_SECTIONS, Study
from moecore.study.yaml_document import cap_line_count, load_yaml_document, parse_yaml_document

LEVELS = [(n, ", ".join([f"*a{n - 1}" if n else "x"] * 9)) for n in range(9)]
LAUGHS = "".join(f"a{n}: &a{n} [{names}]\n" for n, names in LEVELS)
MERGES = "m0: &m0 {x: 1}\n" + "".join(
    f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 8)}], k{level}: 1}}\n"
    for level in range(1, 9)
)
LIGHT = "import moecore.study.params_reader, moecore.run.run_record, moecore.run.stage_entry"
CHECK = "import moecore.pipeline.cli as cli\ntry: cli.app(['check'])\nexcept SystemExit: pass"
SCIPY = "scipy.special scipy.ndimage scipy.optimize scipy.stats"


class NoisyTopK(config.Config):
    kind: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(2, ge=1)
    noise: float | None = Field(None, gt=0, le=1)
    activation: Literal["relu", "gelu"] = "relu"


class Load(config.Config):
    """Has a field named like its tag."""

    kind: Literal["load"] = "load"
    load: float = Field(0.1, ge=0)


Router = Annotated[NoisyTopK | Load, Field(discriminator="kind")]


class Method(config.Config):
    router: Router | None = None
    parts: tuple[Router, ...] = ()
    width: int | Literal["auto"] = 3
    blocks: Literal["all"] | tuple[int, ...] = "all"

    @model_validator(mode="after")
    def _not_four(self) -> "Method":
        if self.width == 4:
            raise ValueError("width 4 does not fit")
        return self


class Params(config.Config):
    epsilons: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    flag: bool = False
    method: Annotated[Method, params_reader.ParamsKeyTemplate("methods.{method}")]


def test_yaml_1_2():
    text = (
        "{a: 1e-4, b: no, c: on, d: yes, e: 010, f: 0o17, g: 0x1F, h: true, i: False, j: ~, "
        "k: 2020-01-01, l: .inf, m: 1.5E3, n: '12:30', o: -.5, p: '1', q: &x true, r: *x}"
    )
    data = parse_yaml_document(text).data
    words = {"b": "no", "c": "on", "d": "yes", "k": "2020-01-01", "n": "12:30", "p": "1"}
    numbers = {"a": 1e-4, "e": 10, "f": 15, "g": 31, "l": float("inf"), "m": 1500.0, "o": -0.5}
    assert data == words | numbers | {"h": True, "i": False, "j": None, "q": True, "r": True}
    plain = {str, int, float, bool, type(None)}
    assert {type(value) for value in data.values()} == plain, "no types of ruamel's own"
    assert parse_yaml_document("1: a\n").data == {"1": "a"} and parse_yaml_document("").data is None


def test_merge_keys_and_their_places():
    parsed = parse_yaml_document("base: &b {k: 1, l: {n: 2}}\nm: {<<: *b, k: 5}\no: [3, {p: 4}]\n")
    assert parsed.data["m"] == {"k": 5, "l": {"n": 2}}
    assert list(parsed.data["m"]) == ["k", "l"], "merged keys come first"
    assert parsed.place(["m", "k"]) == "params.yaml:2:13"
    assert parsed.place(["m", "l"]) == "params.yaml:2:1", "the mapping that merges it"
    assert parsed.place(["m", "l", "n"]) == "params.yaml:1:21"
    assert parsed.place(["o", 1, "p"]) == "params.yaml:3:9"
    assert parsed.place(["o", 5]) == "params.yaml:3:1"
    assert parsed.below("m").place(["k"]) == "params.yaml:2:13"
    assert len(parse_yaml_document(MERGES).data["m8"]) == 9, "merges of merges are read at once"


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("b:\n  c: 1\n  d: 2\n  c: 3", "params.yaml:4:3", 'duplicate key "c"'),
        ("a: [1\nb: 2", "params.yaml:2:2", "not valid YAML"),
        ("a: 1\n---\nb: 2", "params.yaml:2:1", "another document"),
        ("a:\n\tb: 1", "params.yaml:2:1", "not valid YAML"),
        ("\x00", "params.yaml", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "params.yaml:1:1", "os.system"),
        ("a: !own x", "params.yaml:1:1", "found the tag !own"),
        ("a: !!binary aGk=", "params.yaml:1:1", "found bytes"),
        ("a: !!int x", "params.yaml", "not valid YAML: ValueError"),
        ("a: !!bool x", "params.yaml", "not valid YAML: KeyError"),
        ("a: !", "params.yaml:1:4", "found the tag !;"),
        ("a: #c\n|\n\n", "params.yaml", "not valid YAML: NotImplementedError"),
        (f"a: {'9' * 5000}", "params.yaml", "not valid YAML"),
        ("a: 1\n? [a, b]\n: 1\n", "params.yaml:2:3", "found a list or mapping as key"),
        (f"? {'k' * 5000}\n: 1", "params.yaml:1:3", "found a word of 5,000 letters"),
        ('"a\\0b": 1', "params.yaml:1:1", "the character NUL"),
        (f"a: {'[' * 70}{']' * 70}", "params.yaml:1:68", "more than 64 levels"),
        (f"a: {'[' * 5000}", "params.yaml:1:68", "more than 64 levels"),
        (f"a: {'{' * 5000}", "params.yaml:1:68", "more than 64 levels"),
        ("- " * 5000, "params.yaml:1:131", "more than 64 levels"),
        ("# ours\n%YAML 1.1\n---\na: no\n", "params.yaml:2:1", "found %YAML 1.1; allowed: YAML"),
        ("\ufeff%YAML 1.1\r---\ra: 1", "params.yaml:1:1", "found %YAML 1.1; allowed: YAML 1.2"),
        ("%YAML 1.3\n---\na: 1\n", "params.yaml:1:1", "found %YAML 1.3; allowed: YAML 1.2"),
        ("a: &x 1\nb: &y 2\nc:\n  - &x 3\n", "params.yaml:4:5", "&x; allowed: another name than"),
        ("a: &x {b: 1}\nb: &x [*x]\n", "params.yaml:2:4", "&x; allowed: another name than in li"),
        (LAUGHS, "params.yaml:1:13", "found more than 100,000 values"),
        ("a: &x {<<: *x}", "params.yaml", ""),
    ],
)
def test_faults_of_the_text_have_a_place(text, place, word):
    with pytest.raises(files.UserError) as caught:
        parse_yaml_document(text)
    (line,) = str(caught.value).split("\n")
    assert line.startswith(f"{place}: ") and word in line


def test_dvc_reads_otherwise_what_is_refused():
    said = "%YAML 1.1\n---\na: no\n"  # by the rules of YAML 1.1 a truth value
    assert parse_yaml(said, "params.yaml") == {"a": "no"}
    assert parse_yaml_document(said.replace("1.1", "1.2")).data == {"a": "no"}
    assert parse_yaml("a: !", "params.yaml") == {"a": ""}
    with pytest.raises(YAMLFileCorruptedError):
        parse_yaml("a: &x 1\nb: &x 2\n", "params.yaml")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
        max_leaves=8,
    )
)
def test_json_is_yaml(value):
    assert parse_yaml_document(json.dumps(value)).data == value


def test_what_is_no_file_of_text_is_said(tmp_path):
    path = tmp_path / "params.yaml"
    with pytest.raises(files.UserError, match=r"params\.yaml: cannot be read \(no such file"):
        read_stage_params(Params, str(path), method="vmoe")
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(files.UserError, match=r"params.yaml:2:4: not UTF-8 text \(byte 8\)"):
        load_yaml_document(path)
    path.write_bytes(b"#" * 300_001)
    with pytest.raises(files.UserError, match="found 300,001 bytes"):
        load_yaml_document(path)


def test_a_line_is_a_line_and_no_longer_than_a_screen():
    spelt = yaml_document.spell_keys(("a\nb\u2028", 0, "c" * 200))
    assert spelt == rf"a\nb\u2028[0].{'c' * 28}...{'c' * 28}"
    assert cap_line_count(["p:1:1: a"] * 20) == "\n".join(["p:1:1: a"] * 20)
    lines = cap_line_count(["p:1:1: a"] * 10_000).split("\n")
    assert len(lines) == 21 and lines[-1] == "p: and 9,980 more; mend these first"


def test_reads_exactly_what_is_declared(tmp_path, monkeypatch):
    path = tmp_path / "other.yaml"
    path.write_text(
        "epsilons: [0, 1e-4, 1]\nunrelated: {is: [not, looked, at]}\n"
        "methods: {vmoe: {router: {kind: load}}, broken: 5}\n"
    )
    monkeypatch.setenv("MOECORE_PARAMS", str(path))
    params = read_stage_params(Params, method="vmoe")
    assert params.epsilons == (0.0, 1e-4, 1.0) and params.method.router == Load()
    keys = {"epsilons": "epsilons", "flag": "flag", "method": "methods.{method}"}
    assert params_keys_by_field(Params) == keys


def problems(text: str) -> list[str]:
    with pytest.raises(files.UserError) as caught:
        params_reader.extract_settings(Params, parse_yaml_document(text), method="vmoe")
    return str(caught.value).split("\n")


MANY = """\
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
    blocks: [a]
"""
EXPECTED = [
    "1:15: epsilons[1]: found 2 (int); allowed: less than or equal to 1",
    "1:18: epsilons[2]: found 'x' (str); allowed: a valid number",
    "2:1: flag: found 'no' (str); allowed: a valid boolean",
    "7:7: methods.vmoe.router.k: found 'two' (str); allowed: a valid integer",
    "8:7: methods.vmoe.router.noise: found -1 (int); allowed: greater than 0",
    "9:7: methods.vmoe.router.activation: found 'gleu' (str), did you mean 'gelu'?; allowed: ",
    "10:7: methods.vmoe.router.kk: unknown key, did you mean 'k'?; allowed: kind, k, noise, act",
    "11:26: methods.vmoe.parts[0].load: found -1 (int); allowed: greater than or equal to 0",
    "11:37: methods.vmoe.parts[1]: found kind: laod, did you mean 'load'?; allowed: noisy_top_k, ",
    "11:51: methods.vmoe.parts[2]: kind is missing; allowed: kind: noisy_top_k | load",
    "11:59: methods.vmoe.parts[3]: found 5 (int); allowed: kind: noisy_top_k | load",
    "12:5: methods.vmoe.width: found 'x' (str); allowed: a valid integer or 'auto'",
    "13:14: methods.vmoe.blocks[0]: found 'a' (str); allowed: a valid integer",
]


def test_every_problem_with_place_key_found_allowed():
    lines = problems(MANY)
    for line, expected in zip(lines, EXPECTED, strict=True):
        assert line.startswith(f"params.yaml:{expected}")


@pytest.mark.parametrize(
    ("text", "place_and_key", "word"),
    [
        ("epsilons: [0]\nmethods: {vmoe: {width: 4}}", "2:11: methods.vmoe", "width 4 does not"),
        ("epsilons: ['0']\nmethods: {vmoe: {}}", "1:12: epsilons[0]", "found '0' (str)"),
        ("epsilons: [0]\nflag: 1\nmethods: {vmoe: {}}", "2:1: flag", "found 1 (int)"),
        ("epsilons: [.nan]\nmethods: {vmoe: {}}", "1:12: epsilons[0]", "found NaN (float)"),
        ("epsilons: [0]\nmethods: {vmeo: {}}", "2:1: methods.vmoe", "did you mean 'vmeo'?"),
        ("methods: {vmoe: {}}", "1:1: epsilons", "missing; the file has: methods"),
        (
            "epsilons: [0]\nmethods: {vmoe: {router: {kind: noisy_top_k, k: 2.0}}}",
            "2:46: methods.vmoe.router.k",
            "found 2.0 (float)",
        ),
        ("epsilons: [0]\nmethods: {vmoe: }", "2:11: methods.vmoe", "found null; allowed: the keys"),
    ],
)
def test_single_problems(text, place_and_key, word):
    (line,) = problems(text)
    assert line.startswith(f"params.yaml:{place_and_key}: ") and word in line


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (LIGHT, "torch mlflow numpy"),
        ("import moecore.nn.layers.moe", "matplotlib scipy PIL timm mlflow dvc"),
        ("import moecore.training.loop", "torch.distributed.tensor torch._dynamo scipy mlflow"),
        (CHECK, f"matplotlib {SCIPY} mlflow pandas torch._dynamo"),
    ],
)
def test_imports_are_light(code, heavy):
    code += f"\nimport sys\nassert not {set(heavy.split())} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source_layout.ROOT)


def params_of(script: str) -> type[config.Config] | None:
    return getattr(importlib.import_module(f"moecore.stages.{script}"), "Params", None)


SCRIPTS = sorted(path.stem for path in (source_layout.ROOT / "stages").glob("[a-z]*.py"))
READERS = [
    name for name in SCRIPTS if name in stages.STAGE_SECTIONS and params_of(name) is not None
]


def types_in(annotation: Any) -> set[type]:
    """The types anywhere inside an annotation, but for None."""
    if isinstance(annotation, type) and not get_args(annotation):
        return {annotation} - {type(None)}
    return {one for inner in get_args(annotation) for one in types_in(inner)}


@pytest.mark.parametrize("script", READERS)
def test_a_stage_reads_sections_with_the_types_of_the_whole(script):
    params = params_of(script)
    for name, key in params_keys_by_field(params).items():
        if key in Study.model_fields:
            whole = types_in(Study.model_fields[key].annotation)
            assert whole == types_in(params.model_fields[name].annotation)


def test_every_section_is_known():
    named = {section for sections in stages.STAGE_SECTIONS.values() for section in sections}
    assert named | {"monitor", "packages"} | set(MEASURED_SECTIONS) == set(Study.model_fields)


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}}, {"a": {"x": 1, "y": 4}, "b": 3}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({"a": None}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"kind": "cifar", "classes": 10}, {"kind": "imagenet"}, {"kind": "imagenet"}),
        ({"kind": "cifar", "c": 1}, {"kind": "cifar", "s": 8}, {"kind": "cifar", "c": 1, "s": 8}),
        ({"kind": "cifar", "c": 1}, {"s": 8}, {"kind": "cifar", "c": 1, "s": 8}),
    ],
)
def test_merging(base, over, expected):
    before = json.dumps([base, over])
    assert params_layers.merge_settings(base, over) == expected
    assert json.dumps([base, over]) == before, "changes neither side"
