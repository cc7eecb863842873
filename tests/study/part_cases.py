"""Parts that lack something, and what `moecore check` says of each."""

from typing import NamedTuple

HEAD = '''\
"""A part as a user writes it."""

from typing import Any, ClassVar, Literal

import torch

from moecore.core.config import Config
from moecore.core.records import Step
from moecore.nn.routers.base import RouterConfig
from moecore.nn.experts.base import ExpertsConfig


'''
KIND = '    kind: Literal["my_part"] = "my_part"\n'
ROUTER = (
    "class Net(torch.nn.Module):\n"
    "    def __init__(self, width: int) -> None:\n"
    "        super().__init__()\n"
    "        self.weight = torch.nn.Linear({width}, 4)\n\n"
    "    def forward(self, {words}):\n"
    "        return tokens\n\n\n"
    "class MyPart(RouterConfig):\n" + KIND + "    k: int = 2\n\n"
    "    def build(self, width, experts, basis=None):\n"
    "        return Net(width)\n"
)
EXPERTS = (
    "class Net(torch.nn.Module):\n"
    "    def forward(self, rows):\n"
    "        return rows.values\n\n\n"
    "class MyPart(ExpertsConfig):\n" + KIND + "    number: int = 4\n\n"
    "    def build(self, width):\n"
    "        return Net()\n"
)
MEASUREMENT = (
    "class MyPart(Config):\n    images: int = 10\n\n\n"
    "class Result(Config):\n    mean: float\n\n\n"
    "def measure(subject, settings):\n    return Result(mean=0)\n"
)
DENSE = "  dense: {}"
ROUTED = (DENSE, "  dense: {router: {kind: my_part}, experts: {kind: mlp, number: 4}}")


class Case(NamedTuple):
    """A part, what of params.yaml names it, and what the check says."""

    family: str
    body: str
    said: tuple[str, ...]  # regular expressions, one for each line, in order
    edit: tuple[str, str] = ("", "")
    listed: bool = True


MY = r"moecore/{}/my_part.py"
CASES = {
    "a regularizer that lacks all": Case(
        "training/regularizers",
        f"class MyPart(Config):\n{KIND}\n    def __call__(self, records, scale):\n        return\n",
        (
            MY + r": MyPart: found __call__\(self, records, scale\), but it is called "
            r"__call__\(step\): missing a required argument: 'scale'; allowed: def __call__\(self, "
            r"step\)",
            MY + r": MyPart lacks weight; allowed: weight: float = Field",
            MY + r": MyPart lacks needs; allowed: needs: ClassVar\[frozenset\[str\]\] = frozenset",
        ),
    ),
    "an attribute without its type": Case(
        "training/regularizers",
        f'class MyPart(Config):\n    needs = frozenset({{"routing"}})\n{KIND}',
        (MY + r":13: PydanticUserError: A non-annotated attribute was detected: .*ClassVar",),
    ),
    "a name that is not there": Case(
        "training/regularizers",
        f"class MyPart(Confg):\n{KIND}",
        (MY + r":13: NameError: name 'Confg' is not defined",),
    ),
    "no Python": Case(
        "training/regularizers", "class MyPart(Config:\n", (MY + r":13: SyntaxError: ",)
    ),
    "a need that nobody meets": Case(
        "training/regularizers",
        "class MyPart(Config):\n    needs: ClassVar[frozenset[str]] = frozenset({'rooting'})\n"
        f"{KIND}    weight: float = 0.1\n\n    def __call__(self, step: Step):\n        return 0\n",
        (MY + r": MyPart: needs has rooting; allowed: basis, guidance, load, routing, two_views",),
    ),
    "a kind that is not the file's": Case(
        "training/regularizers",
        "class MyPart(Config):\n    needs: ClassVar[frozenset[str]] = frozenset({'routing'})\n"
        '    kind: Literal["mine"] = "mine"\n    weight: float = 0.1\n\n'
        "    def __call__(self, step: Step):\n        return 0\n",
        (MY + r": MyPart: kind is 'mine'; allowed: kind: Literal\[\"my_part\"\] = \"my_part\"",),
    ),
    "a kind that is any text": Case(
        "attacks",
        'class MyPart(Config):\n    kind: str = "my_part"\n',
        (
            MY + r": MyPart lacks kind; allowed: kind: Literal",
            MY + r": MyPart lacks the method __call__; allowed: def __call__\(self, model, task, ",
            MY + r": MyPart lacks the method refuses",
            MY + r": MyPart lacks the method does_not_apply",
            MY + r": MyPart lacks name; allowed: the property of AttackBase",
            MY + r": MyPart lacks together",
            MY + r": MyPart lacks climbs_task",
        ),
    ),
    "a router": Case(
        "nn/routers",
        f"class MyPart(Config):\n{KIND}\n    def build(self, width):\n        return None\n",
        (
            MY + r": MyPart: found build\(self, width\), but it is called build\(width, experts, ",
            MY + r": MyPart lacks the method with_k",
            MY + r": MyPart lacks the method finetuned",
            MY + r": MyPart lacks the method active",
            MY + r": MyPart lacks provides; allowed: a property, frozenset\[str\]",
            MY + r": MyPart lacks wants",
        ),
    ),
    "a router that is called otherwise": Case(
        "nn/routers",
        ROUTER.format(width="width", words="tokens"),
        (
            r"params.yaml:\d+:\d+: methods.dense.router: " + MY + r": Net: found forward\(self, "
            r"tokens\), but it is called forward\(tokens, context\)",
        ),
        ROUTED,
    ),
    "a router that cannot be built": Case(
        "nn/routers",
        ROUTER.format(width="width + None", words="tokens, context"),
        (r"params.yaml:\d+:\d+: methods.dense: " + MY + r":16: TypeError: unsupported operand",),
        ROUTED,
    ),
    "experts": Case(
        "nn/experts",
        f"class MyPart(Config):\n{KIND}\n    def build(self):\n        return None\n",
        (
            MY + r": MyPart: found build\(self\), but it is called build\(width\)",
            MY + r": MyPart lacks number; allowed: number: int = Field\(default=8, ge=2\)",
            MY + r": MyPart lacks provides",
        ),
    ),
    "experts that lend no basis": Case(
        "nn/experts",
        EXPERTS,
        (r"params.yaml:\d+:\d+: methods.dense: " + MY + r" lacks lent_basis; allowed: an attr",),
        (DENSE, "  dense: {router: {kind: noisy_top_k}, experts: {kind: my_part}}"),
    ),
    "a backbone": Case(
        "nn/backbones",
        f"class MyPart(Config):\n{KIND}\n    def build(self, image):\n        return None\n",
        (
            MY + r": MyPart: found build\(self, image\), but it is called build\(image, moe\)",
            MY + r": MyPart lacks the method grid",
            MY + r": MyPart lacks depth; allowed: depth: int, the number of blocks",
        ),
    ),
    "a source": Case(
        "data/sources",
        f"class MyPart(Config):\n{KIND}\n    def prepare(self):\n        return {{}}\n",
        (
            MY + r": MyPart: found prepare\(self\), but it is called prepare\(folder\)",
            MY + r": MyPart lacks seed; allowed: seed: int = Field\(0, ge=0\)",
            MY + r": MyPart lacks task; allowed: task: ClassVar",
        ),
    ),
    "a task": Case(
        "tasks",
        f"class MyPart(Config):\n{KIND}\n    def predict(self):\n        return None\n",
        (
            MY + r": MyPart: found predict\(self\), but it is called predict\(output\)",
            *[MY + r": MyPart lacks the method \w+; allowed: def \w+\(self"] * 21,
            *[MY + r": MyPart lacks \w+; allowed: a property \w+"] * 6,
        ),
    ),
    "a teacher": Case(
        "training/teachers",
        f"class MyPart(Config):\n{KIND}    seed: Literal[0] = 0\n",
        (
            MY + r": MyPart lacks the method build; allowed: def build\(self, image\)",
            MY + r": MyPart lacks training; allowed: training: Training, or training: None = None",
        ),
    ),
    "a calibrator": Case(
        "measure/calibrators",
        f"class MyPart(Config):\n{KIND}\n    def calibrates(self):\n        return True\n",
        (
            MY + r": MyPart: found calibrates\(self\), but it is called calibrates\(task\)",
            MY + r": MyPart lacks fit; allowed: a method",
            MY + r": MyPart lacks needs_out_of_fold",
        ),
    ),
    "a measurement that lacks a function": Case(
        "measure",
        MEASUREMENT,
        (MY + r" lacks applies; allowed: def applies\(subject: Subject\) -> str \| None",),
    ),
    "a measurement that is called otherwise": Case(
        "measure",
        MEASUREMENT + "\n\ndef applies(subject):\n    return None\n",
        (
            MY + r": measure cannot be called as it is, measure\(subject, settings, parts\): too "
            r"many positional arguments",
        ),
    ),
    "a part that its family does not name": Case(
        "nn/routers",
        ROUTER.format(width="width", words="tokens, context"),
        (
            r"params.yaml:\d+:\d+: methods.dense.router: found kind: my_part, which "
            r"moecore/nn/routers/__init__.py does not name; add moecore/nn/routers/my_part.py to "
            r"it; allowed: eigenbasis, ",
        ),
        ROUTED,
        listed=False,
    ),
}
