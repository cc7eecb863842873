"""What does not fit is found before anything runs: an edit, and the place and key it names."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
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


def assert_one_line_names(key: str, lines: list[str], text: str) -> None:
    """One line is of a key, stands at its place, and says what was found and what is allowed."""
    [line] = [line for line in lines if f": {key}: " in line] or [f"no line of {key}: {lines}"]
    assert in_its_place(line, text, key), line
    assert re.search(rf": {re.escape(key)}: \S.*; (allowed|set `root`)", line), line


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
LIBRARY = {"kind": "docstrings", "packages": ["networkx"]}
BRIEF = {"epochs": 1, "batch": 8, "learning_rate": 0.001}
BRIGHTENED = {"explorer": {"augmentations": ["brightness"]}}
TWICE = {"router": TOP_2, "regularizers": SWITCH + SWITCH} | EXPERTS
RANKED = {"router": {"kind": "eigenbasis", "rank": 8}, "experts": {"kind": "eigen"}}
TEXT_ATTACK = {"images": 8, "epsilons": [0.1], "attacks": [{"kind": "fgsm"}]}


def grouped(number: int, kept: int) -> dict[str, Any]:
    """A router with groups of experts."""
    return {"router": TOP_2 | {"groups": {"number": number, "kept": kept}}}


# Of the file alone: text, edits, and the key of the one line about it
FILE = [
    (IMAGES, {"run.methods": ["dense", "vmeo"]}, "run.methods[1]"),
    (IMAGES, {"run.methods": ["vmoe", "vmoe"]}, "run.methods[1]"),
    (IMAGES, {"run.seeds": [-1]}, "run.seeds[0]"),
    (IMAGES, {"run.seeds": [0, 0]}, "run.seeds[1]"),
    (IMAGES, {"run.seeds": [2**63]}, "run.seeds[0]"),
    (IMAGES, {"run.seeds": []}, "run"),
    (IMAGES, {"run.thorough": ["pretrain"]}, "run"),
    (IMAGES, {"run.thorough": GONE}, "run.thorough"),
    (IMAGES, {"run.measurements": ["cots"]}, "run.measurements[0]"),
    (IMAGES, {"methods.soft-moe": {}}, "methods.soft-moe"),
    (IMAGES, {"methods." + "a" * 101: {}}, f"methods.{'a' * 28}...{'a' * 28}"),
    (IMAGES, {"pretrian": {}}, "pretrian"),
    (IMAGES, {"model": {"width": 32}}, "model"),
    (IMAGES, {"claims": [CLAIM | {"method": "tgrr"}]}, "claims[0].method"),
    (IMAGES, {"claims": [CLAIM | {"phase": "adversarial"}]}, "claims[0].phase"),
    (IMAGES, {"claims": [QUESTION]}, "claims[0].source"),
    (IMAGES, {"claims": [UNQUOTED]}, "claims[0].quote"),
    (IMAGES, {"claims": [CLAIM, CLAIM]}, "claims[1].metric"),
    (IMAGES, {"claims": [CLAIM, TURNED]}, "claims[1].metric"),
    (IMAGES, {"questions": [QUESTION | {"margin": 0.1}]}, "questions[0]"),
    (IMAGES, {"questions": [QUESTION | {"against": "tgr"}]}, "questions[0].against"),
    (IMAGES, {"calibrate.calibrator": {}}, "calibrate.calibrator"),
    (IMAGES, {"calibrate": None}, "calibrate"),
    (IMAGES, {"linear_experts": {}}, "linear_experts"),
    (IMAGES, {"invariance": GONE}, "invariance"),
    (IMAGES, {"data.finetune": GONE}, "data.finetune"),
    (IMAGES, {"teacher_router.seed": 1}, "teacher_router.seed"),
    (IMAGES, {"pretrain.learning_rate": float("inf")}, "pretrain.learning_rate"),
    (IMAGES, {"pretrain.learning_rate": float("nan")}, "pretrain.learning_rate"),
    (IMAGES, {"pretrain.epochs": 10**21}, "pretrain.epochs"),
    (IMAGES, {"pretrain.warmup_epochs": 20}, "pretrain.warmup_epochs"),
    (
        IMAGES,
        {"methods.dense.pretrain": {"warmup_epochs": 99}},
        "methods.dense.pretrain.warmup_epochs",
    ),
    (IMAGES, {"methods.dense.guided_finetuning": True}, "methods.dense.guided_finetuning"),
    (IMAGES, {"teacher": {"kind": "no_teacher"}}, "methods.tgr.regularizers[0]"),
    (
        IMAGES,
        {"methods.dense.regularizers": [{"kind": "importance", "weight": 0.1}]},
        "methods.dense.regularizers[0]",
    ),
    *(
        (
            IMAGES,
            {"methods.vmoe.router": {"kind": kind}, "methods.vmoe.regularizers": SWITCH},
            "methods.vmoe.regularizers[0]",
        )
        for kind in ("expert_choice", "soft_slots", "merged")
    ),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [{"kind": "pairwise_consistency"}], "pretrain.views": {}},
        "methods.vmoe.regularizers",
    ),
    *(
        (IMAGES, {f"methods.tgr.{key}": losses}, f"methods.tgr.{key}[{place}]")
        for key, losses, place in (
            ("regularizers", SWITCH + KL + SWITCH, 2),
            ("unguided_regularizers", KL, 0),
            ("regularizers", [{"kind": "teacher_router"}], 0),
            ("regularizers", [{"kind": "region_routing"}], 0),
        )
    ),
    *(
        (IMAGES, {"methods.other": router | EXPERTS}, f"methods.other.router.{key}")
        for key, router in (
            ("group_size", {"router": TOP_2 | {"group_size": 4}}),
            ("k", {"router": {"kind": "top_p", "k": 1}}),
            ("balance", {"router": ALL_4}),
            ("groups.kept", grouped(2, 2)),
            ("groups.kept", grouped(4, 2)),
            ("sampling_weight", {"router": UNSAMPLED}),
            ("router.group_size", {"router": NESTED}),
        )
    ),
    (IMAGES, {"methods.dense.upcycle": {"kind": "drop"}}, "methods.dense.upcycle.kind"),
    *(
        (IMAGES, {"methods.vmoe.regularizers": [loss]}, f"methods.vmoe.regularizers[0].{key}")
        for loss, key in (
            (SWITCH[0] | {"group_size": 4}, "group_size"),
            (AVERAGE, "sigma_end"),
            (FIXED, "exponent"),
        )
    ),
    (IMAGES, {"model.depth": 1, "model.drop_path": 0.1}, "model.drop_path"),
    (VOLUMES, {"model": {"kind": "sfcn", "head": "number", "bins": 8}}, "model.bins"),
    (WORDS, {"methods.smoe.permuted": True}, "methods.smoe.permuted"),
    (WORDS, {"routing": {"views": {"shift": 1}}}, "routing.views"),
    (WORDS, {"routing": {"augmentations": ["flip"]}}, "routing.augmentations"),
    *(
        (IMAGES, {f"{section}.views": {key: value}}, f"{section}.views.{key}")
        for section in ("pretrain", "finetune", "teacher.training", "routing")
        for key, value in (
            ("affine", {}),
            ("jitter", {}),
            ("randaugment", {"operations": 0}),
            ("randaugment", {"magnitude": 0, "names": ["rotate"]}),
            ("fill", "border"),
        )
    ),
    (IMAGES, {"pretrain.mix": {"mixup": 1, "probability": 0}}, "pretrain.mix"),
    *(
        (IMAGES, {f"{section}.views": {"size": 12}}, f"{section}.views.size")
        for section in ("pretrain", "finetune", "teacher.training", "routing")
    ),
    (IMAGES, {"data.finetune": {"kind": "digit"}}, "data.finetune"),
    (IMAGES, {"data.finetune": {"kind": "a\nb"}}, "data.finetune"),
    (VOLUMES, {"pretrain.label_smoothing": 0.1}, "pretrain.label_smoothing"),
    (VOLUMES, {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix"),
    (VOLUMES, {"pretrain.views.crop": {}}, "pretrain.views.crop"),
    (VOLUMES, {"pretrain.views.affine": {"shear": 5}}, "pretrain.views.affine.shear"),
    (VOLUMES, {"routing.augmentations.1": "brightness"}, "routing.augmentations[1]"),
    (VOLUMES, {"methods.dense.distillation": 0.5}, "methods.dense.distillation"),
    (
        VOLUMES,
        {"robustness.attacks.1": {"kind": "pgd", "objective": "dlr"}},
        "robustness.attacks[1].objective",
    ),
    (
        VOLUMES,
        {"robustness": GONE, "transfer": {"attack": {"kind": "apgd", "objective": "dlr"}}},
        "transfer.attack.objective",
    ),
    (
        VOLUMES,
        {"explorer": {"attack": {"kind": "fgsm", "objective": "cross_entropy"}}}
        | {"run.measurements": ["explorer"]},
        "explorer.attack.objective",
    ),
    (
        IMAGES,
        {"data.pretrain": {"kind": "mosaic", "source": {"kind": "digits"}}}
        | {"run.phases": ["pretrain"], "run.thorough": [], "run.measurements": []}
        | {"robustness.attacks.0": {"kind": "pgd", "objective": "dlr"}},
        "robustness.attacks[0].objective",
    ),
    (
        VOLUMES,
        {"methods.ermoe.regions.experts": ["wm", "skull"]},
        "methods.ermoe.regions.experts[1]",
    ),
    (IMAGES, {"teacher": GONE}, "methods.tgr.regularizers[0]"),
    (VOLUMES, {"robustness.survivors": True}, "robustness.survivors"),
    (VOLUMES, {"calibrate.calibrator": {"kind": "temperature"}}, "calibrate.calibrator.kind"),
    (
        VOLUMES,
        {"data.pretrain": {"kind": "bids", "root": "x", "maps": None}},
        "methods.ermoe.regions",
    ),
    (VOLUMES, {"teacher": {"kind": "timm", "name": "vit_tiny_patch16_224"}}, "teacher.kind"),
    (VOLUMES, {"model": {"kind": "vit"}}, "model.kind"),
    (VOLUMES, {"data.pretrain": {"kind": "digits"}}, "run.thorough"),
    (VOLUMES, {"data.pretrain": {"kind": "digits"}}, "model.kind"),
    (IMAGES, {"data.finetune": {"kind": "phantom"}}, "run.thorough"),
    (
        IMAGES,
        {"data.pretrain": {"kind": "phantom"}, "run.phases": ["pretrain", "finetune"]},
        "run.phases[1]",
    ),
    (WORDS, {"pretrain.views": {"shift": 1}}, "pretrain.views"),
    (WORDS, {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix"),
    (WORDS, {"pretrain.adversarial": {"steps": 1}}, "pretrain.adversarial"),
    (WORDS, {"methods.smoe.regularizers": [{"kind": "pairwise_consistency"}]}, "methods.smoe"),
    (WORDS, {"robustness": TEXT_ATTACK}, "robustness"),
    (WORDS, {"transfer": {}}, "transfer"),
    (WORDS, {"data.finetune": LIBRARY, "finetune": BRIEF}, "finetune"),
    (VOLUMES, BRIGHTENED | {"run.measurements": ["explorer"]}, "explorer.augmentations[0]"),
    (CAPTIONS, {"methods.dense.text": TWICE}, "methods.dense.text.regularizers[1]"),
    (IMAGES, {"methods.other": RANKED}, "methods.other.router.rank"),
    (WORDS, {"calibrate": {"calibrator": {"kind": "linear"}}}, "calibrate.calibrator.kind"),
    (CAPTIONS, {"pretrain.views": {"flip": True}}, "pretrain.views.flip"),
    (CAPTIONS, {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix"),
    (CAPTIONS, {"pretrain.label_smoothing": 0.1}, "pretrain.label_smoothing"),
    (CAPTIONS, {"model": {"kind": "vit"}}, "model.kind"),
    (CAPTIONS, {"data.pretrain": {"kind": "digits"}}, "run.phases[0]"),
    (CAPTIONS, {"methods.dense.distillation": 0.5}, "methods.dense.distillation"),
    (CAPTIONS, {"run.measurements": ["few_shot"]}, "run.phases[0]"),
    (CAPTIONS, {"calibrate": {"calibrator": {"kind": "temperature"}}}, "run.phases[0]"),
    *(
        (
            IMAGES,
            {f"methods.vmoe.{name}": value for name, value in edits.items()},
            f"methods.vmoe.{key}",
        )
        for edits, key in (
            ({"unguided_regularizers": [{"kind": "load"}]}, "unguided_regularizers"),
            ({"router.balance": {"kind": "quantile"}}, "regularizers[0]"),
            (
                {"router": {"kind": "noisy_top_k", "k": 4, "balance": {"kind": "quantile"}}},
                "router.k",
            ),
            ({"router": CONSTANT, "regularizers": []}, "router.renormalise"),
            (
                {
                    "router": {"kind": "depth", "router": CONSTANT},
                    "regularizers": [{"kind": "z_loss", "weight": 0}],
                },
                "router.router.renormalise",
            ),
            ({"router": {"kind": "relu", "k": 4}, "regularizers": L1}, "router.k"),
            ({"router": {"kind": "relu", "k": 1}, "regularizers": []}, "regularizers"),
            ({"router": {"kind": "hash"}}, "regularizers[0]"),
            (
                {"regularizers": [SWITCH[0] | {"level": "group", "group_size": 3}]},
                "regularizers[0].group_size",
            ),
            ({"regularizers": [{"kind": "simbal", "weight": 0.1}]}, "regularizers[0]"),
            ({"regularizers": [{"kind": "diversity_simplicity"}]}, "regularizers[0]"),
            ({"router": COMPETITION | {"k": 1}, "regularizers": []}, "router"),
            (
                {
                    "unguided_regularizers": [{"kind": "load"}],
                    "regularizers": [{"kind": "load"}, {"kind": "router_kl"}],
                },
                "unguided_regularizers[0]",
            ),
            ({"experts.fine": 1}, "experts.fine"),
            ({"upcycle": True, "experts.init": "flat"}, "experts.init"),
            ({"teacher_router": {}}, "teacher_router"),
        )
    ),
]

# With data and models, which takes longer
RUN = [
    (
        IMAGES,
        {
            "methods.vmoe.router": CONSTANT | {"renormalise": False, "balance": QUANTILE},
            "methods.vmoe.regularizers": [],
            "methods.vmoe.pretrain": {"batch": 1},
            "model.patch": 16,
        },
        "methods.vmoe.router.balance",
    ),
    (IMAGES, {"model.heads": 5}, "model.heads"),
    *(
        (
            CAPTIONS,
            {
                "run.measurements": ["zero_shot"],
                "zero_shot": {"source": {"kind": "digits"}} | other,
            },
            f"zero_shot.{key}",
        )
        for key, other in (
            ("names", {"names": ["nought", "one"]}),
            ("source", {"source": {"kind": "cifar", "download": True}}),
        )
    ),
    (IMAGES, {"model.depth": 10**9}, "model.depth"),
    (IMAGES, {"model.depth": 2}, "methods.vmoe.blocks"),
    (IMAGES, {"data.finetune.size": 30}, "model.patch"),
    (IMAGES, {"data.finetune": {"kind": "cifar", "download": True, "size": 24}}, "data.finetune"),
    (IMAGES, {"teacher.data": {"kind": "digits", "size": 24}}, "teacher.data"),
    (
        IMAGES,
        {
            "teacher.data": {"kind": "clusters", "patch": 8, "grid": 2},
            "methods.tgr.distillation": 0.5,
        },
        "methods.tgr.distillation",
    ),
    (IMAGES, {"finetune.batch": 401}, "finetune.batch"),
    (
        IMAGES,
        {"methods.vmoe.regularizers": [{"kind": "pairwise_consistency", "special": True}]}
        | {"model.pooling": "mean"},
        "methods.vmoe.regularizers[0].special",
    ),
    (
        IMAGES,
        {"finetune.k": 1, "methods.vmoe.router": COMPETITION, "methods.vmoe.regularizers": []},
        "finetune.k",
    ),
    *(
        (IMAGES, {f"{section}.views": {"shift": 1, **colours}}, f"{section}.views.{key}")
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
        )
        for shots, key in ((15, "batch"), (51, "shots"))
    ),
    (IMAGES, {"pretrain.batch": 1295}, "pretrain.batch"),
    (IMAGES, {"teacher_router.batch": 1295}, "teacher_router.batch"),
    (IMAGES, {"finetune.shots": 400}, "finetune.shots"),
    (IMAGES, {"finetune.views": {"shift": 42}}, "finetune.views.shift"),
    (IMAGES, {"data.finetune.validation": 1500}, "data.finetune"),
    (
        IMAGES,
        {"methods.dense": {"router": {"kind": "told"}, "experts": {"kind": "mlp", "number": 4}}},
        "methods.dense.router.kind",
    ),
    (IMAGES, SPOKEN | {"pretrain.mix": {"mixup": 0.8}}, "pretrain.mix"),
    *(
        (IMAGES, SPOKEN | MEASURED | {f"routing.{key}": value}, f"routing.{place}")
        for key, value, place in (
            ("views", {"shift": 1, "jitter": {"contrast": 0.5}}, "views.jitter"),
            ("augmentations", ["flip"], "augmentations"),
        )
    ),
    (IMAGES, SPOKEN | {"pretrain.views": {"erasing": 0.5}}, "pretrain.views.erasing"),
    (IMAGES, SPOKEN | {"data.pretrain.zipf": 4.0}, "data.pretrain"),
    (IMAGES, SPOKEN | {"data.pretrain.families": 5}, "data.pretrain.families"),
    (IMAGES, SPOKEN | {"data.pretrain.change": "rotation"}, "data.pretrain"),
    (
        IMAGES,
        SPOKEN
        | {"data.pretrain.form": "cells", "pretrain.views": {"shift": 1}}
        | {"model.patch": 48, "model.pooling": "mean"},
        "model.patch",
    ),
    (
        IMAGES,
        {"methods.dense": {"router": {"kind": "hash", "by": "word"}, "experts": {"kind": "mlp"}}},
        "methods.dense.router.kind",
    ),
    (IMAGES, {"teacher.model.patch": 16}, "teacher.model.patch"),
    (IMAGES, {"teacher.model.patch": 4}, "teacher.model"),
    (
        IMAGES,
        {"methods.dense": {"router": {"kind": "noisy_top_k"}, "experts": {"kind": "eigen"}}}
        | {"methods.dense.upcycle": True, "methods.dense.experts.factored_output": True},
        "methods.dense.upcycle",
    ),
    *(
        (IMAGES, {"methods.dense.upcycle": True, key: value}, "methods.dense.upcycle")
        for key, value in (
            ("teacher.model.heads", 1),
            ("teacher.model.pooling", "mean"),
            ("teacher.model.pooling", "class+distillation"),
            ("model.pooling", "mean"),
            ("model.pooling", "class+distillation"),
            ("teacher.model.position_on_class", False),
        )
    ),
    (IMAGES, {"model": SWIN | {"heads": [2]}}, "model"),
    (IMAGES, {"model": SWIN | {"heads": [5, 4]}}, "model"),
    (IMAGES, {"model": SWIN}, "teacher.model.kind"),
    (IMAGES, {"teacher.model.depth": 1}, "teacher.model.depth"),
    (
        IMAGES,
        {"data.pretrain": {"kind": "image_folder", "root": "~nosuchuser/x"}},
        "data.pretrain.root",
    ),
    (
        WORDS,
        {"sizes": {"models": [{"name": "a", "model": {"kind": "sfcn"}}]}},
        "sizes.models[0].model.kind",
    ),
    (
        WORDS,
        {"sizes": {"models": [{"name": "a", "model": {"kind": "vit"}, "method": NINE_OF_EIGHT}]}},
        "sizes.models[0].method.router.k",
    ),
    (WORDS, {"model": {"kind": "vit"}}, "model.kind"),
    (WORDS, {"data.pretrain.packages": ["nowhere"]}, "data.pretrain"),
    *(
        (
            IMAGES,
            {f"methods.vmoe.{name}": value for name, value in edits.items()},
            f"methods.vmoe.{key}",
        )
        for edits, key in (
            (
                {"router": {"kind": "merged"}, "experts.kind": "eigen", "regularizers": []},
                "experts.kind",
            ),
            ({"router.k": 9}, "router.k"),
            ({"router.residual": True, "blocks": [1]}, "router.residual"),
            ({"experts.fine": 7}, "experts.fine"),
            (
                {"router.groups": {"number": 3, "kept": 1}, "regularizers": []},
                "router.groups.number",
            ),
            ({"regularizers": [{"kind": "truth_kl"}]}, "regularizers[0]"),
        )
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


@pytest.mark.parametrize(("text", "edits", "key"), FILE)
def test_what_is_wrong_in_the_file_is_named(text, edits, key):
    written = edited(text, edits)
    stages = STAGES if text is IMAGES else ()
    _, lines = read_study_and_problems(parse_yaml_document(written), stages)
    assert_one_line_names(key, lines, written)


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


@pytest.mark.parametrize(("text", "edits", "key"), RUN)
def test_what_was_seen_to_fail_later_is_said_first(project, text, edits, key):
    path = project / "params.yaml"
    if text is not IMAGES:
        (project / "dvc.yaml").unlink()
    lines = refused(path, edits, text)
    assert_one_line_names(key, lines, path.read_text(encoding="utf-8"))
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


def test_predictions_that_no_stage_makes_are_refused():
    text = edited(VOLUMES, {"calibrate.calibrator.fit_on": "out_of_fold"})
    document = parse_yaml_document(text, "params.yaml")

    def refusals(*stages: str) -> list[str]:
        _, lines = read_study_and_problems(document, ["calibrate", *stages])
        return [line for line in lines if "calibrate.calibrator.fit_on" in line]

    assert not refusals("out_of_fold")
    (line,) = refusals()
    assert in_its_place(line, text, "calibrate.calibrator.fit_on") and "not in dvc.yaml" in line
