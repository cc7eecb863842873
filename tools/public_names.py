"""Write docs/api.md: the public names by use, and what a part of each family may define.

    python -m tools.public_names

The sentences come from docstrings, those of attributes and fields from the comments beside them.
"""

import ast
import inspect
import re
import textwrap
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import moecore
from moecore import parts, testing
from moecore.core.config import Part
from moecore.core.routing_records import Batch, Guidance
from moecore.data.prepared import Split

PAGE = Path(__file__).resolve().parents[1] / "docs/api.md"
USES = {
    "Use a trained model": (
        "load_model model_folder predict_in_batches ModelOutput Prepared UserError __version__"
    ),
    "MoE layers in your own model": (
        "MoELayer routers experts balances backbones regularizers routing_loss update_routers "
        "upcycle export"
    ),
    "Look at routing": "trace lens RoutingRecord expert_counts expert_agreement load_cv2",
    "Measure and attack": "measure calibrators attacks Target LogitsModel",
    "Data, and what is learned": "sources tasks teachers",
    "Write parts of your own": "parts testing",
}
FAMILIES = (  # base classes of parts, each followed by what its parts build
    "Router Balance BalanceModule Experts ExpertsModule Backbone BackboneModel Regularizer "
    "Teacher Attack Task Source Measurement Calibrator FittedCalibrator"
).split()
RECORDS: tuple[type, ...] = (
    *(moecore.RoutingRecord, parts.RoutingContext, moecore.ModelOutput, Batch, Guidance),
    *(parts.ObjectiveInputs, parts.TokenLayout, parts.Rows, parts.Encoded, parts.MeasuredModel),
    *(parts.Card, Split, parts.Score, parts.Metric, parts.Chart, parts.OnPage),
)
HEAD = """\
# The public names

`import moecore` offers these names and loads none of them before it is used; everything else may
change without notice. A family of parts is a module: `from moecore.routers import NoisyTopK`.
Settings of parts are keyword arguments, which type checkers and editors know;
[methods.md](methods.md) has their equations. `import moecore`, `MoELayer`, `trace`, `load_model`
and `testing` need torch, numpy, pydantic, pyyaml and safetensors alone. The site (`make docs`) adds
signatures, arguments and errors to this page, which `python -m tools.public_names` writes.
"""
CONTRACTS = """\
## What a part may define

A part is a class of settings that inherits from one of these classes of `moecore.parts`. It must
define what is marked **required**, and its name, `kind: Literal["my_lab.tilted"] = "my_lab.tilted"`
for class `Tilted` of that module (a measurement has no `kind`); everything else has a default.
`moecore.testing` has a check of every family. [Your own router](tutorials/own_router.md),
[measurement](tutorials/own_measurement.md) and [other parts](tutorials/own_parts.md) are examples.

**On the meta device.** `moecore check`, `load_model` and resuming build models on torch's meta
device, where tensors have shapes but no values. So `build` may not read values (`.item()`,
`.tolist()`, `if tensor:`), open files, or name a device; settings and shapes must be enough. The
same holds for `Measurement.model_refusal`. What needs values belongs into `forward`, `after_step`,
`measure` or `write`.
"""
FIELDS = (
    "## Records\n\nB images, T tokens per image, E experts, K classes, d the width of a token.\n"
)


def render_public_names() -> str:
    """Return the text of docs/api.md.

    Raises:
        ValueError: for a public name that USES lacks, or that is not public.
    """
    used = [name for names in USES.values() for name in names.split()]
    if wrong := set(moecore.__all__) ^ set(used):
        raise ValueError(f"{', '.join(sorted(wrong))}: found in only one of USES and __all__")
    lines = [HEAD]
    for use, names in USES.items():
        lines += [f"## {use}\n", *_table("moecore", names.split())]
    lines += ["### moecore.parts\n", *_table("moecore.parts", _offered(parts))]
    lines += ["### moecore.testing\n", *_table("moecore.testing", _offered(testing))]
    lines.append(CONTRACTS)
    for name in FAMILIES:
        lines += [f"### {name}\n", first_sentence(getattr(parts, name)) + "\n"]
        lines += _rows("to define", list_definitions(getattr(parts, name)))
    lines.append(FIELDS)
    for record in RECORDS:
        lines += [f"### {record.__name__}\n", _paragraphs(record) + "\n"]
        lines += _rows("field", list_fields(record))
    return "\n".join(lines).rstrip() + "\n"


def _table(module: str, names: list[str]) -> list[str]:
    values = {name: getattr(_module(module), name) for name in names}
    sentences = [
        (f"`{name}`", first_sentence(value) + _kinds(value)) for name, value in values.items()
    ]
    return _rows(f"in `{module}`", sentences)


def _kinds(value: Any) -> str:
    """Return the names of the parts that a family's module offers."""
    if not isinstance(value, ModuleType) or value in (parts, testing):
        return ""
    offered = [name for name in dir(value) if is_kind(getattr(value, name))]
    return f" Parts: {', '.join(f'`{name}`' for name in offered)}." if offered else ""


def is_kind(value: Any) -> bool:
    """Return whether this is a part, or a measurement, that params.yaml can name."""
    bases = (Part, parts.Measurement)
    return inspect.isclass(value) and issubclass(value, bases) and not inspect.isabstract(value)


def _module(name: str) -> ModuleType:
    return {"moecore": moecore, "moecore.parts": parts, "moecore.testing": testing}[name]


def _offered(module: ModuleType) -> list[str]:
    """Return the public names of a module that moecore defines."""
    return [
        name
        for name in dir(module)
        if not name.startswith("_")
        and "moecore" in getattr(getattr(module, name), "__module__", "")
    ]


def _rows(title: str, rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    if unexplained := [name for name, text in rows if not text]:
        raise ValueError(f"{', '.join(unexplained)}: no comment or docstring says what it is")
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {title} | |", "|---|---|", *(f"| {line} |" for line in lines), ""]


def first_sentence(value: Any) -> str:
    """Return the first line of a docstring; of a string such as ``__version__``, its kind."""
    if isinstance(value, str):
        return "The installed version."
    text = inspect.getdoc(value) or ""
    if not text:
        raise ValueError(f"{value}: has no docstring")
    return _code_marks(text.splitlines()[0])


def _paragraphs(value: type) -> str:
    return _code_marks(inspect.getdoc(value) or "").replace("\n\n", "<br>").replace("\n", " ")


def _code_marks(text: str) -> str:
    """Return Markdown of a docstring, whose code stands between double backticks."""
    return text.replace("*", "\\*").replace("``", "`")


def list_definitions(base: type) -> list[tuple[str, str]]:
    """Return name and meaning of all attributes and methods that a subclass may define."""
    found: dict[str, tuple[str, str]] = {}
    for owner in inspect.getmro(base):
        if owner.__module__.startswith("moecore") and owner.__name__ not in ("Part", "Config"):
            for name, text in [*list_fields(owner), *_list_methods(owner)]:
                found.setdefault(name.split("(")[0].strip("`"), (name, text))
    return list(found.values())


def _list_methods(owner: type) -> Iterator[tuple[str, str]]:
    for name, value in vars(owner).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        is_public = not name.startswith("_") or name == "__call__"
        if not is_public or not inspect.isfunction(function) or not function.__doc__:
            continue
        required = " **Required.**" if getattr(value, "__isabstractmethod__", False) else ""
        arguments = list(inspect.signature(function).parameters)[1:]
        call = "" if isinstance(value, property) else f"({', '.join(arguments)})"
        yield f"`{name}{call}`", first_sentence(function) + required


def list_fields(owner: type) -> list[tuple[str, str]]:
    """Return attributes of a class, with their default and the comment beside or above them."""
    source = textwrap.dedent(inspect.getsource(owner))
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    fields = []
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        if name.startswith("_") or name == "kind":
            continue
        end = node.end_lineno or node.lineno
        above = []
        while (line := node.lineno - 1 - len(above)) in comments and _is_alone(source, line):
            above.insert(0, comments[line])
        text = " ".join([*above, *([comments[end]] if end in comments else [])])
        text = text or _description(node)
        required = ""
        written = ast.unparse(node.annotation)
        annotation = re.sub(r"^ClassVar\[(.*)\]$", r"\1", written)
        # pydantic asks for a setting without default; a base class sets buffers, but no modules
        if node.value is None and (annotation != written or written == "nn.Module"):
            required = " **Required.**"
        default = "" if node.value is None else f" = {ast.unparse(node.value)}"
        if default.startswith(" = Field("):
            default = ""
        fields.append((f"`{name}: {annotation}{default}`", _code_marks(text) + required))
    return fields


def _is_alone(source: str, line: int) -> bool:
    return source.splitlines()[line - 1].lstrip().startswith("#")


def _description(node: ast.AnnAssign) -> str:
    """Return the argument ``description`` of a setting's Field."""
    for keyword in getattr(node.value, "keywords", ()):
        if keyword.arg == "description":
            return str(ast.literal_eval(keyword.value))
    return ""


if __name__ == "__main__":
    PAGE.write_text(render_public_names(), encoding="utf-8")
