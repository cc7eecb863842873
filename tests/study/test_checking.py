"""What does not fit is found before anything runs: an edit, and the place and key it names."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.data.sources.digits import Digits
from moecore.study.check import (
    check_and_describe_study,
    check_study,
    params_schema,
    read_study_and_problems,
)
from moecore.study.document import load_yaml_document, parse_yaml_document
from moecore.study.params_file import dump_inline_yaml
from tests.data.making import image_classes
from tests.project import PARAMS, check_params, compose_shipped, write_question
from tests.training.small import COMPETITION

QUESTIONS = ("ermoe/image_text", "moge/swin", "ours/routers", "prc/paper_scale")
STAGES = tuple(
    name for name in load_yaml_document(ROOT / "dvc.yaml").data["stages"] if name != "code"
)

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
SPOKEN = {
    "data.pretrain": {"kind": "dialects", "source": {"kind": "digits", "size": 24}, "train": 2000}
}
MEASURED = {
    "pretrain.views": {"shift": 1},
    "run.phases": ["pretrain"],
    "run.thorough": ["pretrain"],
}
GONE = object()


def edited(text: str, edits: dict[str, Any]) -> str:
    """A params.yaml with values put at dotted keys; numbers are places of a list."""
    data = yaml.safe_load(text)
    for keys, value in edits.items():
        *way, last = [int(word) if word.isdigit() else word for word in keys.split(".")]
        inner = data
        for word in way:
            inner = inner[word]
        if value is GONE:
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


CLAIM = {
    "paper": "PRC",
    "source": "table 4",
    "says": "so",
    "quote": "It is so.",
    "metric": "match_top1",
    "method": "tgr",
    "against": "vmoe",
    "better": "higher",
}
TURNED = CLAIM | {"method": "vmoe", "against": "tgr", "better": "lower", "says": "turned round"}
UNQUOTED = {key: value for key, value in CLAIM.items() if key != "quote"}
QUESTION = {key: CLAIM[key] for key in ("metric", "method", "against", "better")} | {"asks": "so"}
SWIN = {"kind": "swin_v2", "patch": 4, "width": 24, "depths": [2, 2], "heads": [2, 4], "window": 2}
CONSTANT = {"kind": "noisy_top_k", "k": 1, "renormalise": True}
QUANTILE = {"kind": "quantile"}
L1 = [{"kind": "adaptive_l1"}]
SWITCH = [{"kind": "switch_balance"}]
KL = [{"kind": "router_kl"}]
TOP_2 = {"kind": "noisy_top_k", "k": 2}
ALL_4 = {"kind": "noisy_top_k", "k": 4, "balance": {"kind": "loss_free"}}
UNSAMPLED = {"kind": "depth", "router": TOP_2, "sampling_weight": 0.5}
NESTED = {"kind": "frozen_copy", "router": TOP_2 | {"group_size": 4}}
AVERAGE = {"kind": "group_sparsity", "filter": "average", "sigma_end": 2.0}
FIXED = {"kind": "group_sparsity", "sigma_start": 3.0, "sigma_end": 3.0, "exponent": 3.0}
EXPERTS = {"experts": {"kind": "mlp", "number": 4}}
NINE_OF_EIGHT = {"router": {"kind": "noisy_top_k", "k": 9}, "experts": {"kind": "mlp"}}
TEXT_ATTACK = {"images": 8, "epsilons": [0.1], "attacks": [{"kind": "fgsm"}]}


def grouped(number: int, kept: int) -> dict[str, Any]:
    """A router with groups of experts."""
    return {"router": TOP_2 | {"groups": {"number": number, "kept": kept}}}


# Of the file alone: text, edits, key, words
FILE = [
    (IMAGES, {"run.methods": ["dense", "vmeo"]}, "run.methods[1]", "did you mean 'vmoe'?; allowed"),
    (IMAGES, {"run.methods": ["vmoe", "vmoe"]}, "run.methods[1]", "'vmoe' is there twice"),
    (IMAGES, {"run.seeds": [-1]}, "run.seeds[0]", "allowed: integers ≥ 0"),
    (IMAGES, {"run.seeds": [0, 0]}, "run.seeds[1]", "0 is there twice"),
    (IMAGES, {"run.seeds": [2**63]}, "run.seeds[0]", "found 9.22e+18"),
    (IMAGES, {"run.seeds": []}, "run", "found none of seeds"),
    (IMAGES, {"run.thorough": ["pretrain"]}, "run", "thorough names pretrain; allowed: finetune"),
    (IMAGES, {"run.thorough": GONE}, "run.thorough", "missing; the stage measure of dvc.yaml"),
    (IMAGES, {"run.measurements": ["cots"]}, "run.measurements[0]", "did you mean 'cost'?"),
    (IMAGES, {"methods.soft-moe": {}}, "methods.soft-moe", "found the name 'soft-moe'"),
    (IMAGES, {"methods." + "a" * 101: {}}, f"methods.{'a' * 28}...{'a' * 28}", "up to 100"),
    (IMAGES, {"pretrian": {}}, "pretrian", "unknown key, did you mean 'pretrain'?"),
    (
        IMAGES,
        {"model": {"width": 32}},
        "model",
        "kind is missing; allowed: kind: language_model | sfcn | single_layer",
    ),
    (IMAGES, {"claims": [CLAIM | {"method": "tgrr"}]}, "claims[0].method", "did you mean 'tgr'?"),
    (IMAGES, {"claims": [CLAIM | {"phase": "adversarial"}]}, "claims[0].phase", "allowed: pre"),
    (IMAGES, {"claims": [QUESTION]}, "claims[0].source", "missing; allowed: Where it stands"),
    (IMAGES, {"claims": [UNQUOTED]}, "claims[0].quote", "missing; allowed: The paper's sentence"),
    (IMAGES, {"claims": [CLAIM, CLAIM]}, "claims[1].metric", "found the two numbers of claims[0]"),
    (IMAGES, {"claims": [CLAIM, TURNED]}, "claims[1].metric", "found the two numbers of claims[0]"),
    (IMAGES, {"questions": [QUESTION | {"margin": 0.1}]}, "questions[0]", "found margin 0.1"),
    (IMAGES, {"questions": [QUESTION | {"against": "tgr"}]}, "questions[0].against", "itself"),
    (IMAGES, {"calibrate.calibrator": {}}, "calibrate.calibrator", "kind is missing; allowed: kin"),
    (IMAGES, {"calibrate": None}, "calibrate", "found null; allowed: the keys calibrator, "),
    (IMAGES, {"linear_experts": {}}, "linear_experts", "no stage of dvc.yaml reads it; allowed: r"),
    (IMAGES, {"invariance": GONE}, "invariance", "missing; the stage measure reads it; allowed: t"),
    (IMAGES, {"data.finetune": GONE}, "data.finetune", "missing; the stage finetune works on it"),
    (IMAGES, {"teacher_router.seed": 1}, "teacher_router.seed", "unknown key; allowed: "),
    (
        IMAGES,
        {"pretrain.learning_rate": float("inf")},
        "pretrain.learning_rate",
        "found inf; allow",
    ),
    (IMAGES, {"pretrain.learning_rate": float("nan")}, "pretrain.learning_rate", "found .nan"),
    (IMAGES, {"pretrain.epochs": 10**21}, "pretrain.epochs", "found 1e+21; allowed: numbers up to"),
    (
        IMAGES,
        {"pretrain.warmup_epochs": 20},
        "pretrain.warmup_epochs",
        "but epochs is 2; allowed: 0",
    ),
    (
        IMAGES,
        {"methods.dense.pretrain": {"warmup_epochs": 99}},
        "methods.dense.pretrain.warmup_epochs",
        "found 99, but epochs is 2",
    ),
    (
        IMAGES,
        {"methods.dense.guided_finetuning": True},
        "methods.dense.guided_finetuning",
        "teacher",
    ),
    (
        IMAGES,
        {"methods.vmoe.unguided_regularizers": [{"kind": "load"}]},
        "methods.vmoe.unguided_regularizers",
        "none is left out",
    ),
    (
        IMAGES,
        {"teacher": {"kind": "no_teacher"}},
        "methods.tgr.regularizers[0]",
        "allowed: dense, open_clip",
    ),
    (
        IMAGES,
        {"methods.dense.regularizers": [{"kind": "importance", "weight": 0.1}]},
        "methods.dense.regularizers[0]",
        "importance needs a router, but the method has no router",
    ),
    (
        IMAGES,
        {"methods.vmoe.router.balance": {"kind": "quantile"}},
        "methods.vmoe.regularizers[0]",
        "importance balances the load beside the router's quantile; allowed: one of both",
    ),
    (
        IMAGES,
        {"methods.vmoe.router": {"kind": "noisy_top_k", "k": 4, "balance": {"kind": "quantile"}}},
        "methods.vmoe.router.k",
        "found 4, and quantile balances what 4 experts leave out; allowed: 1 to 3",
    ),
    (
        IMAGES,
        {"methods.vmoe.router": CONSTANT, "methods.vmoe.regularizers": []},
        "methods.vmoe.router.renormalise",
        "found true with k = 1: the weight is always 1, and no loss teaches the router; allowed: s",
    ),
    (
        IMAGES,
        {
            "methods.vmoe.router": {"kind": "depth", "router": CONSTANT},
            "methods.vmoe.regularizers": [{"kind": "z_loss", "weight": 0}],
        },
        "methods.vmoe.router.router.renormalise",
        "found true with k = 1",
    ),
    (
        IMAGES,
        {"methods.vmoe.router": {"kind": "relu", "k": 4}, "methods.vmoe.regularizers": L1},
        "methods.vmoe.router.k",
        "found 4, and of 4 experts relu then leaves out none; allowed: 1 to 3",
    ),
    (
        IMAGES,
        {"methods.vmoe.router": {"kind": "relu", "k": 1}, "methods.vmoe.regularizers": []},
        "methods.vmoe.regularizers",
        "found no adaptive_l1, which alone brings relu to k = 1 experts; allowed: it",
    ),
    *(
        (
            IMAGES,
            {"methods.vmoe.router": {"kind": kind}, "methods.vmoe.regularizers": SWITCH},
            "methods.vmoe.regularizers[0]",
            f"found switch_balance, a constant beside the router {kind}, which uses all experts",
        )
        for kind in ("expert_choice", "soft_slots", "merged")
    ),
    (
        IMAGES,
        {"methods.vmoe.router": {"kind": "hash"}},
        "methods.vmoe.regularizers[0]",
        "found importance, but the router hash learns nothing; allowed: no such loss, or another",
    ),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [SWITCH[0] | {"level": "group", "group_size": 3}]},
        "methods.vmoe.regularizers[0].group_size",
        "found 3, and a step of pretrain has 64 images; allowed: a divisor of these",
    ),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [{"kind": "simbal", "weight": 0.1}]},
        "methods.vmoe.regularizers[0]",
        "simbal needs a router with start: orthonormal, but noisy_top_k provides load, routing",
    ),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [{"kind": "diversity_simplicity"}]},
        "methods.vmoe.regularizers[0]",
        "diversity_simplicity needs the router dynamic, but noisy_top_k provides load, routing",
    ),
    (
        IMAGES,
        {"methods.vmoe.router": COMPETITION | {"k": 1}, "methods.vmoe.regularizers": []},
        "methods.vmoe.router",
        "diversity_weight: found 0.1, but with k = 1 no two are chosen; allowed: 0, or a larger k",
    ),
    (
        IMAGES,
        {
            "methods.vmoe.regularizers": [{"kind": "pairwise_consistency"}],
            "pretrain.views": {},
        },
        "methods.vmoe.regularizers",
        "pretrain.views changes nothing",
    ),
    *(
        (IMAGES, {f"methods.tgr.{key}": losses}, f"methods.tgr.{key}[{place}]", words)
        for key, losses, place, words in (
            (
                "regularizers",
                SWITCH + KL + SWITCH,
                2,
                "found switch_balance a second time; allowed",
            ),
            ("unguided_regularizers", KL, 0, "router_kl needs a teacher"),
            (
                "regularizers",
                [{"kind": "teacher_router"}],
                0,
                "which teacher_router: {fit: joint} ",
            ),
            ("regularizers", [{"kind": "region_routing"}], 0, "which regions adds; allowed: other"),
        )
    ),
    (
        IMAGES,
        {"methods.vmoe.unguided_regularizers": [{"kind": "load"}]}
        | {"methods.vmoe.regularizers": [{"kind": "load"}, {"kind": "router_kl"}]},
        "methods.vmoe.unguided_regularizers[0]",
        "found load a second time; allowed: each kind once",
    ),
    *(
        (IMAGES, {"methods.other": router | EXPERTS}, f"methods.other.router.{key}", words)
        for key, router, words in (
            (
                "group_size",
                {"router": TOP_2 | {"group_size": 4}},
                "found 4, but without a capacity no im",
            ),
            ("k", {"router": {"kind": "top_p", "k": 1}}, "found 1: each token then has its first"),
            ("balance", {"router": ALL_4}, "found loss_free, but every token has all 4 experts"),
            ("groups.kept", grouped(2, 2), "found 2, and there are as many groups, so that none"),
            ("groups.kept", grouped(4, 2), "found 2: the groups of the 2 best experts are always"),
            ("sampling_weight", {"router": UNSAMPLED}, "found 0.5, but without sampling there is"),
            ("router.group_size", {"router": NESTED}, "found 4, but without a capacity no images"),
        )
    ),
    (
        IMAGES,
        {"methods.dense.upcycle": {"kind": "drop"}},
        "methods.dense.upcycle.kind",
        "found drop, but a dense method has no experts; allowed: true, false",
    ),
    (
        IMAGES,
        {"methods.vmoe.experts.fine": 1},
        "methods.vmoe.experts.fine",
        "found 1 piece of each expert, which is the whole; allowed: null, or above 1",
    ),
    (
        IMAGES,
        {"methods.vmoe.upcycle": True, "methods.vmoe.experts.init": "flat"},
        "methods.vmoe.experts.init",
        "found flat, but the experts begin as the teacher's MLPs; allowed: leave it out, or upc",
    ),
    *(
        (
            IMAGES,
            {"methods.vmoe.regularizers": [loss]},
            f"methods.vmoe.regularizers[0].{key}",
            words,
        )
        for loss, key, words in (
            (SWITCH[0] | {"group_size": 4}, "group_size", "found 4, but the level is batch; allow"),
            (AVERAGE, "sigma_end", "found 2.0, but the filter is average; allowed: leave it out"),
            (FIXED, "exponent", "found 3.0, but σ stays as it is; allowed: leave it out, or anot"),
        )
    ),
    (IMAGES, {"model.depth": 1, "model.drop_path": 0.1}, "model.drop_path", "found 0.1, which gr"),
    (
        VOLUMES,
        {"model": {"kind": "sfcn", "head": "number", "bins": 8}},
        "model.bins",
        "found 8, but the head is a number; allowed: leave it out, or head: bins",
    ),
    (WORDS, {"methods.smoe.permuted": True}, "methods.smoe.permuted", "the label of a word is"),
    (WORDS, {"routing": {"views": {"shift": 1}}}, "routing.views", "which has no views; leave it"),
    (WORDS, {"routing": {"augmentations": ["flip"]}}, "routing.augmentations", "has no views"),
    (
        IMAGES,
        {"methods.vmoe.teacher_router": {}},
        "methods.vmoe.teacher_router",
        "nothing of the method is guided by a teacher's router; allowed: leave it out, or the reg",
    ),
    *(
        (IMAGES, {f"{section}.views": {key: value}}, f"{section}.views.{key}", words)
        for section in ("pretrain", "finetune", "teacher.training", "routing")
        for key, value, words in (
            ("affine", {}, "found one that changes nothing; allowed: null, or other degrees, tr"),
            ("jitter", {}, "found one that changes nothing; allowed: null, or other brightness"),
            ("randaugment", {"operations": 0}, "found one that changes nothing"),
            ("randaugment", {"magnitude": 0, "names": ["rotate"]}, "found one that changes noth"),
            ("fill", "border", "found border, but no view reaches beyond its image; allowed: zer"),
        )
    ),
    (IMAGES, {"pretrain.mix": {"mixup": 1, "probability": 0}}, "pretrain.mix", "mixes nothing"),
    *(
        (
            IMAGES,
            {f"{section}.views": {"size": 12}},
            f"{section}.views.size",
            "unknown key; allowed: shift, crop, flip, affine",
        )
        for section in ("pretrain", "finetune", "teacher.training", "routing")
    ),
    (
        IMAGES,
        {"data.finetune": {"kind": "digit"}},
        "data.finetune",
        "kind: digit, did you mean 'dig",
    ),
    (IMAGES, {"data.finetune": {"kind": "a\nb"}}, "data.finetune", r"found kind: a\nb; allowed: "),
    (
        VOLUMES,
        {"pretrain.label_smoothing": 0.1},
        "pretrain.label_smoothing",
        "real numbers (data.p",
    ),
    (VOLUMES, {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix", "are real numbers (data.pretrain)"),
    (
        VOLUMES,
        {"pretrain.views.crop": {}},
        "pretrain.views.crop",
        "volumes have shift, flip, affine",
    ),
    (
        VOLUMES,
        {"pretrain.views.affine": {"shear": 5}},
        "pretrain.views.affine.shear",
        "found 5, which is for flat images; allowed for volumes: 0",
    ),
    (
        VOLUMES,
        {"routing.augmentations.1": "brightness"},
        "routing.augmentations[1]",
        "identity, noi",
    ),
    (
        VOLUMES,
        {"methods.dense.distillation": 0.5},
        "methods.dense.distillation",
        "is a class (data.",
    ),
    (
        VOLUMES,
        {"robustness.attacks.1": {"kind": "pgd", "objective": "dlr"}},
        "robustness.attacks[1].objective",
        "found dlr, which needs classes; allowed: task",
    ),
    (
        VOLUMES,
        {"robustness": GONE, "transfer": {"attack": {"kind": "apgd", "objective": "dlr"}}},
        "transfer.attack.objective",
        "found dlr, which needs classes; allowed: task",
    ),
    (
        VOLUMES,
        {"explorer": {"attack": {"kind": "fgsm", "objective": "cross_entropy"}}}
        | {"run.measurements": ["explorer"]},
        "explorer.attack.objective",
        "found cross_entropy, which needs classes; allowed: task",
    ),
    (
        IMAGES,
        {"data.pretrain": {"kind": "mosaic", "source": {"kind": "digits"}}}
        | {"run.phases": ["pretrain"], "run.thorough": [], "run.measurements": []}
        | {"robustness.attacks.0": {"kind": "pgd", "objective": "dlr"}},
        "robustness.attacks[0].objective",
        "found dlr, which needs one label per image; allowed: task",
    ),
    (
        VOLUMES,
        {"methods.ermoe.regions.experts": ["wm", "skull"]},
        "methods.ermoe.regions.experts[1]",
        "found 'skull'; allowed: wm, gm, csf",
    ),
    (
        IMAGES,
        {"teacher": GONE},
        "methods.tgr.regularizers[0]",
        "router_kl needs a teacher, but there is no section teacher; allowed: dense",
    ),
    (VOLUMES, {"robustness.survivors": True}, "robustness.survivors", "allowed: false"),
    (
        VOLUMES,
        {"calibrate.calibrator": {"kind": "temperature"}},
        "calibrate.calibrator.kind",
        "allowed: gap_on_age, linear",
    ),
    (
        VOLUMES,
        {"data.pretrain": {"kind": "bids", "root": "x", "maps": None}},
        "methods.ermoe.regions",
        "needs tissue maps, but maps and dseg of data.pretrain are null",
    ),
    (
        VOLUMES,
        {"teacher": {"kind": "timm", "name": "vit_tiny_patch16_224"}},
        "teacher.kind",
        "allowed for volumes: dense, no_teacher",
    ),
    (VOLUMES, {"model": {"kind": "vit"}}, "model.kind", "are volumes; allowed: vit3d"),
    (VOLUMES, {"data.pretrain": {"kind": "digits"}}, "run.thorough", "cohort_checks needs ages"),
    (VOLUMES, {"data.pretrain": {"kind": "digits"}}, "model.kind", "are flat images; allowed: vit"),
    (
        IMAGES,
        {"data.finetune": {"kind": "phantom"}},
        "run.thorough",
        "measure flat images with clas",
    ),
    (
        IMAGES,
        {"data.pretrain": {"kind": "phantom"}, "run.phases": ["pretrain", "finetune"]},
        "run.phases[1]",
        "are of two sorts, real numbers and classes",
    ),
    (WORDS, {"pretrain.views": {"shift": 1}}, "pretrain.views", "but data.pretrain is text"),
    (WORDS, {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix", "the labels are the words of a text"),
    (
        WORDS,
        {"pretrain.adversarial": {"steps": 1}},
        "pretrain.adversarial",
        "is text; leave it out",
    ),
    (
        WORDS,
        {"methods.smoe.regularizers": [{"kind": "pairwise_consistency"}]},
        "methods.smoe",
        "the method needs two views or a teacher, and data.pretrain is text",
    ),
    (
        WORDS,
        {"robustness": TEXT_ATTACK},
        "robustness",
        "which this stage does not take; leave it o",
    ),
    (
        WORDS,
        {"calibrate": {"calibrator": {"kind": "linear"}}},
        "calibrate.calibrator.kind",
        "allowed: temperature",
    ),
    (CAPTIONS, {"pretrain.views": {"flip": True}}, "pretrain.views.flip", "left and right matter"),
    (CAPTIONS, {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix", "has no caption of its own"),
    (
        CAPTIONS,
        {"pretrain.label_smoothing": 0.1},
        "pretrain.label_smoothing",
        "captions are no clas",
    ),
    (CAPTIONS, {"model": {"kind": "vit"}}, "model.kind", "allowed: two_towers"),
    (CAPTIONS, {"data.pretrain": {"kind": "digits"}}, "run.phases[0]", "retrieval looks for them"),
    (
        CAPTIONS,
        {"methods.dense.distillation": 0.5},
        "methods.dense.distillation",
        "captions are no",
    ),
    (CAPTIONS, {"run.measurements": ["few_shot"]}, "run.phases[0]", "few_shot measure flat images"),
    (
        CAPTIONS,
        {"calibrate": {"calibrator": {"kind": "temperature"}}},
        "run.phases[0]",
        "labels that calibrate does not take",
    ),
]

# With data and models, which takes longer
RUN = [
    (
        IMAGES,
        {
            "methods.vmoe.router": {"kind": "merged"},
            "methods.vmoe.experts.kind": "eigen",
            "methods.vmoe.regularizers": [],
        },
        "methods.vmoe.experts.kind",
        "found experts with bases, whose mean is no basis; allowed beside the router merged: mlp",
    ),
    (IMAGES, {"methods.vmoe.router.k": 9}, "methods.vmoe.router.k", "but there are 4 experts"),
    (
        IMAGES,
        {"methods.vmoe.router.residual": True, "methods.vmoe.blocks": [1]},
        "methods.vmoe.router.residual",
        "found true, but the model has one MoE layer, and so none before it; allowed: false, or mo",
    ),
    (
        IMAGES,
        {
            "methods.vmoe.router": CONSTANT | {"renormalise": False, "balance": QUANTILE},
            "methods.vmoe.regularizers": [],
            "methods.vmoe.pretrain": {"batch": 1},
            "model.patch": 16,
        },
        "methods.vmoe.router.balance",
        "found quantile, and a step has 2 tokens of 1 choices, fewer than 4 experts; allowed: a la",
    ),
    (
        IMAGES,
        {"methods.vmoe.experts.fine": 7},
        "methods.vmoe.experts.fine",
        "found 7; allowed: a divisor of",
    ),
    (
        IMAGES,
        {
            "methods.vmoe.router.groups": {"number": 3, "kept": 1},
            "methods.vmoe.regularizers": [],
        },
        "methods.vmoe.router.groups.number",
        "found 3; allowed: a divisor of experts.number, 4",
    ),
    (IMAGES, {"model.heads": 5}, "model.heads", "allowed: a divisor of model.width = 32"),
    (IMAGES, {"model.depth": 10**9}, "model.depth", "found 1000000000"),
    (
        IMAGES,
        {"model.depth": 2},
        "methods.vmoe.blocks",
        "a model of 2 blocks has only 1 with an odd",
    ),
    (
        IMAGES,
        {"data.finetune.size": 30},
        "model.patch",
        "a divisor of the image size 30 (data.fine",
    ),
    (
        IMAGES,
        {"data.finetune": {"kind": "cifar", "download": True, "size": 24}},
        "data.finetune",
        "found 3 channels, in data.pretrain 1; allowed: as many",
    ),
    (
        IMAGES,
        {"teacher.data": {"kind": "digits", "size": 24}},
        "teacher.data",
        "of 24×24 pixels, those of data.pretrain of 16×16; allowed: the same size",
    ),
    (
        IMAGES,
        {
            "teacher.data": {"kind": "clusters", "patch": 8, "grid": 2},
            "methods.tgr.distillation": 0.5,
        },
        "methods.tgr.distillation",
        "found a teacher of other classes (teacher.data) than data.pretrain has; allowed: 0",
    ),
    (
        IMAGES,
        {"finetune.batch": 401},
        "finetune.batch",
        "200 training images (20 shots of 10 classes",
    ),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [{"kind": "pairwise_consistency", "special": True}]}
        | {"model.pooling": "mean"},
        "methods.vmoe.regularizers[0].special",
        "found true, but the model has no class token; allowed: false",
    ),
    (
        IMAGES,
        {"finetune.k": 1, "methods.vmoe.router": COMPETITION, "methods.vmoe.regularizers": []},
        "finetune.k",
        "found 1, refused by router: diversity_weight: found 0.1, but with k = 1 no two are",
    ),
    *(
        (
            IMAGES,
            {f"{section}.views": {"shift": 1, **colours}},
            f"{section}.views.{key}",
            "has grey images, whose saturation nothing changes; allowed: ",
        )
        for section in ("pretrain", "finetune", "routing")
        for key, colours in (
            ("jitter.saturation", {"jitter": {"saturation": 0.4}}),
            ("randaugment.names", {"randaugment": {"names": ["saturation"]}}),
        )
    ),
    *(
        (
            IMAGES,
            {"data.finetune": {"kind": "clusters", "patch": 8, "grid": 3, "train": 100}}
            | {"finetune.shots": shots},
            f"finetune.{key}",
            words,
        )
        for shots, key, words in (
            (15, "batch", "30 training images (15 shots of 2 classes"),
            (51, "shots", "a class of data.finetune has 50 training images; allowed: 1 to 50"),
        )
    ),
    (IMAGES, {"pretrain.batch": 1295}, "pretrain.batch", "1294 training images (data.pretrain)"),
    (IMAGES, {"finetune.shots": 400}, "finetune.shots", "of data.finetune has 125 training images"),
    (
        IMAGES,
        {"finetune.views": {"shift": 42}},
        "finetune.views.shift",
        "but data.finetune has images",
    ),
    (IMAGES, {"data.finetune.validation": 1500}, "data.finetune", "allowed: 1 to 1437"),
    (
        IMAGES,
        {"methods.dense": {"router": {"kind": "told"}, "experts": {"kind": "mlp", "number": 4}}},
        "methods.dense.router.kind",
        "found told, but nobody knows the truth",
    ),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [{"kind": "truth_kl"}]},
        "methods.vmoe.regularizers[0]",
        "found truth_kl, but nobody knows the truth of data.pretrain's tokens",
    ),
    (IMAGES, SPOKEN | {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix", "would falsify the truth"),
    *(
        (
            IMAGES,
            SPOKEN | MEASURED | {f"routing.{key}": value},
            f"routing.{place}",
            "would falsify the truth",
        )
        for key, value, place in (
            ("views", {"shift": 1, "jitter": {"contrast": 0.5}}, "views.jitter"),
            ("augmentations", ["flip"], "augmentations"),
        )
    ),
    (
        IMAGES,
        SPOKEN | {"pretrain.views": {"erasing": 0.5}},
        "pretrain.views.erasing",
        "would falsify the truth",
    ),
    (IMAGES, SPOKEN | {"data.pretrain.zipf": 4.0}, "data.pretrain", "of the last dialect in train"),
    (
        IMAGES,
        SPOKEN | {"data.pretrain.families": 5},
        "data.pretrain.families",
        "found 5; allowed: null, or of 12 dialects 1, 2, 3, 4, 6, 12",
    ),
    (
        IMAGES,
        SPOKEN | {"data.pretrain.change": "rotation"},
        "data.pretrain",
        "dialects: found 12; allowed: at most 8 of rotation",
    ),
    (
        IMAGES,
        SPOKEN
        | {"data.pretrain.form": "cells", "pretrain.views": {"shift": 1}}
        | {"model.patch": 48, "model.pooling": "mean"},
        "model.patch",
        "found 48, whose patches do not make up the cells of a mosaic",
    ),
    (
        IMAGES,
        {"methods.dense": {"router": {"kind": "hash", "by": "word"}, "experts": {"kind": "mlp"}}},
        "methods.dense.router.kind",
        "found hash, which reads words; images have none",
    ),
    (IMAGES, {"teacher.model.patch": 16}, "teacher.model.patch", "image size 24 (data.finetune)"),
    (IMAGES, {"teacher.model.patch": 4}, "teacher.model", "and methods.tgr, which it guides, 5"),
    (
        IMAGES,
        {"methods.dense": {"router": {"kind": "noisy_top_k"}, "experts": {"kind": "eigen"}}}
        | {"methods.dense.upcycle": True, "methods.dense.experts.factored_output": True},
        "methods.dense.upcycle",
        "set experts.factored_output: false",
    ),
    *(  # all but the first ended in a traceback
        (IMAGES, {"methods.dense.upcycle": True, key: value}, "methods.dense.upcycle", words)
        for key, value, words in (
            ("teacher.model.heads", 1, "found heads 2 in the model, 1 in the teacher"),
            ("teacher.model.pooling", "mean", 'found pooling "class" in the model, "mean" in'),
            ("teacher.model.pooling", "class+distillation", '"class+distillation" in the teacher'),
            ("model.pooling", "mean", 'found pooling "mean" in the model, "class" in'),
            ("model.pooling", "class+distillation", 'found pooling "class+distillation" in the'),
            (
                "teacher.model.position_on_class",
                False,
                "position_on_class true in the model, false in",
            ),
        )
    ),
    (IMAGES, {"model": SWIN | {"heads": [2]}}, "model", "heads has 1 values and depths 2"),
    (
        IMAGES,
        {"model": SWIN | {"heads": [5, 4]}},
        "model",
        "heads is 5 in stage 1, whose width is 24",
    ),
    (IMAGES, {"model": SWIN}, "teacher.model.kind", "found a model of 1 stages; methods.tgr"),
    (
        IMAGES,
        {"teacher.model.depth": 1},
        "teacher.model.depth",
        "no block beside block 1 of methods.",
    ),
    (
        IMAGES,
        {"data.pretrain": {"kind": "image_folder", "root": "~nosuchuser/x"}},
        "data.pretrain.root",
        "~nosuchuser/x",
    ),
    (
        WORDS,
        {"sizes": {"models": [{"name": "a", "model": {"kind": "sfcn"}}]}},
        "sizes.models[0].model.kind",
        "found sfcn, but the images have 2 axes; allowed: another kind, or volumes",
    ),
    (
        WORDS,
        {"sizes": {"models": [{"name": "a", "model": {"kind": "vit"}, "method": NINE_OF_EIGHT}]}},
        "sizes.models[0].method.router.k",
        "but there are 8 experts",
    ),
    (WORDS, {"model": {"kind": "vit"}}, "model.kind", "have 1 axes; allowed: language_model"),
    (
        WORDS,
        {"data.pretrain.packages": ["nowhere"]},
        "data.pretrain",
        "found nowhere, which is not i",
    ),
]


@pytest.mark.parametrize("name", QUESTIONS)  # `moecore study check --all` tries all
def test_our_files_are_in_order_and_editors_accept_them(tmp_path, name):
    path = write_question(tmp_path, name)
    study = check_params(path)
    assert set(study.run.methods) <= set(study.methods)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(load_yaml_document(path).data, params_schema())


def test_the_file_of_the_root_is_in_order_and_names_the_schema():
    path = ROOT / "params.yaml"
    assert check_params(path).run.methods
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    assert first == "# yaml-language-server: $schema=params.schema.json"


@pytest.mark.parametrize("text", [IMAGES, WORDS, CAPTIONS, VOLUMES], ids="IWCV")
def test_a_study_is_in_order(text):
    assert read_study_and_problems(parse_yaml_document(text), ())[1] == []


@pytest.mark.parametrize(("text", "edits", "key", "words"), FILE)
def test_what_is_wrong_in_the_file_is_named(text, edits, key, words):
    written = edited(text, edits)
    _, lines = read_study_and_problems(
        parse_yaml_document(written), STAGES if text is IMAGES else ()
    )
    assert sum(in_its_place(line, written, key) and words in line for line in lines) == 1, lines


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with a params.yaml on data that every machine has, and dvc.yaml."""
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (tmp_path / "params.yaml").write_text(IMAGES, encoding="utf-8")
    return tmp_path


def refused(path: Path, edits: dict[str, Any] | None = None, text: str = IMAGES) -> list[str]:
    path.write_text(edited(text, edits or {}), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check_study(path)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(("text", "edits", "key", "words"), RUN)
def test_what_was_seen_to_fail_later_is_said_first(project, text, edits, key, words):
    path = project / "params.yaml"
    if text is not IMAGES:
        (project / "dvc.yaml").unlink()
    lines = refused(path, edits, text)
    written = path.read_text(encoding="utf-8")
    assert any(in_its_place(line, written, key) and words in line for line in lines), lines
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


def test_a_measurement_may_be_switched_off():
    text = edited(IMAGES, {"run.measurements": ["cost"]})
    assert read_study_and_problems(parse_yaml_document(text), STAGES)[1] == []


def test_problems_of_all_sorts_come_together_in_the_order_of_the_file():
    text = edited(IMAGES, {"run.seeds": [0, 0], "pretrain.unknown": 1})
    one, other = read_study_and_problems(parse_yaml_document(text), STAGES)[1]
    assert "run.seeds[1]" in one and "pretrain.unknown: unknown key" in other


def test_a_thousand_mistakes_are_twenty_lines_and_their_number(project):
    lines = refused(project / "params.yaml", {f"u{number}": 1 for number in range(1000)})
    assert len(lines) == 21 and lines[-1].endswith("and 980 more; mend these first")


def test_a_study_in_order_says_what_its_data_are(project):
    assert check_study(project / "params.yaml").notes == (
        "data.pretrain: Digits; images of 1×16×16; 1,294 train, 144 validation, 359 test; "
        "10 classes",
        "data.finetune: Digits; images of 1×24×24; 1,294 train, 144 validation, 359 test; "
        "10 classes",
    )
    head, *notes = check_and_describe_study(project / "params.yaml").splitlines()
    assert head.endswith("params.yaml: in order (dense, vmoe, tgr; seeds 0)") and len(notes) == 2
    assert {path.name for path in project.iterdir()} == {"params.yaml", "dvc.yaml"}


def noted(path: Path, edits: dict[str, Any]) -> str:
    path.write_text(edited(IMAGES, edits), encoding="utf-8")
    return "\n".join(check_study(path).notes[2:])


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
    assert [line.split(": ")[1] for line in lines] == [
        "run.seeds[1]",
        "data.pretrain.root",
        "finetune.batch",
    ], "the file comes before its data and models"


def test_a_download_is_said_and_no_mistake(project):
    cifar = {"kind": "cifar", "download": True, "size": 16}
    (project / "params.yaml").write_text(
        edited(IMAGES, {"data.pretrain": cifar, "data.finetune": cifar}), encoding="utf-8"
    )
    assert "prepare will download it into data/" in check_study(project / "params.yaml").notes[0]


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
    notes = check_study("params.yaml").notes
    assert "images of 1×16×16; 29 train, 3 validation, 8 test; 2 classes" in notes[0]
    monkeypatch.chdir(tmp_path)
    assert check_study(".runs/own.mine/params.yaml").notes == notes


def test_a_source_that_cannot_say_anything_beforehand_is_left_to_prepare(project, monkeypatch):
    monkeypatch.delattr(Digits, "preview")
    assert check_study(project / "params.yaml").notes == ()


def test_predictions_that_no_stage_makes_are_refused():
    text = edited(VOLUMES, {"calibrate.calibrator.fit_on": "out_of_fold"})
    document = parse_yaml_document(text, "params.yaml")

    def refusals(*stages: str) -> list[str]:
        _, lines = read_study_and_problems(document, ["calibrate", *stages])
        return [line for line in lines if "calibrate.calibrator.fit_on" in line]

    assert not refusals("out_of_fold")
    (line,) = refusals()
    assert in_its_place(line, text, "calibrate.calibrator.fit_on") and "not in dvc.yaml" in line
