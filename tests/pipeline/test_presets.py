"""The studies of the papers: every preset is in order, builds its models, says what the paper says.

Nothing is trained and no data are needed: models are built without memory (torch's meta device).
"""

import re
import shutil
from functools import reduce
from pathlib import Path

import pytest
import torch

from moecore.core.sources import ROOT
from moecore.nn.backbones.image import ImageSpec
from moecore.study.checking.validate import check_params
from moecore.study.reading.document import load_yaml
from moecore.study.reading.overlay import load_presets, resolve_overlay
from moecore.study.writing.write_params import write_params
from moecore.tasks.classification import Classification

PAPERS = ("prc", "tgr", "moge", "ermoe")
EACH = [(study, ()) for study in PAPERS] + [
    (study, (name,)) for study in PAPERS for name in load_presets(ROOT / "pipelines" / study)
]
TOGETHER = [  # combinations that the READMEs name
    ("prc", ("flowers", "top_1")),
    ("prc", ("decay", "cifar10")),
    ("tgr", ("small", "pets")),
    ("tgr", ("base", "cifar10")),
    ("tgr", ("base", "top_1")),
    ("tgr", ("pets", "unguided")),
    ("moge", ("tiny_imagenet", "top_5")),
    ("moge", ("tiny_imagenet", "experts_128")),
    ("moge", ("tiny_imagenet", "swin_tiny_imagenet", "experts_128", "top_2")),
    ("moge", ("imagenet", "swin_imagenet", "experts_64")),
    ("moge", ("imagenet_upcycled", "swin_upcycled")),
    ("moge", ("imagenet_upcycled", "swin_b_upcycled")),
    ("moge", ("imagenet", "swin_moe_s")),
    ("moge", ("imagenet", "swin_moe_b")),
    ("moge", ("tiny_imagenet", "experts_128", "table_5_filter")),
    ("moge", ("tiny_imagenet", "vit_b")),
    ("ermoe", ("tiny_imagenet", "top_4")),
]
ALTERNATIVES = [
    ("prc", ("imagenet", "cifar10", "flowers")),
    ("tgr", ("small", "base")),
    ("tgr", ("cifar10", "pets")),
    ("tgr", ("experts_4", "experts_32", "experts_64", "experts_128")),
    ("moge", ("tiny_imagenet", "imagenet")),
    ("moge", ("top_2", "top_5", "top_9")),
    ("moge", ("swin_moe_s", "swin_moe_b")),
    ("ermoe", ("tiny_imagenet", "cifar10")),
    ("ermoe", ("top_1", "top_3", "top_4", "top_6")),
]


def data_of(study: str, names: tuple[str, ...] = ()) -> dict:
    """The whole params.yaml of a study with presets, as plain data."""
    return resolve_overlay(ROOT / "pipelines" / study, ROOT, names).document.data


@pytest.fixture
def folder(tmp_path):
    """A copy of a study with presets laid over it."""

    def make(study: str, names: tuple[str, ...] = ()) -> Path:
        place = tmp_path / "pipelines" / study
        if not place.exists():
            shutil.copytree(ROOT / "pipelines" / study, place)
        list(write_params(place, ROOT, names))
        return place

    return make


@pytest.mark.parametrize(
    ("study", "names"),
    EACH + TOGETHER,
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "base",
)
def test_every_study_and_preset_is_in_order_and_builds(folder, study, names):
    place = folder(study, names)
    settings = check_params(place / "params.yaml")
    assert load_yaml(str(place / "params.yaml")).data == data_of(study, names)
    for phase in settings.run.phases:
        source = (
            getattr(settings.data, phase) if hasattr(settings.data, phase) else settings.data[phase]
        )
        image = ImageSpec(
            channels=3,
            size=source.size,
            task=Classification(classes=("a", "b")),
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
        )
        for method in settings.methods.values():
            with torch.device("meta"):
                assert settings.model.build(image, method.moe).image.size == source.size


@pytest.mark.parametrize("study", PAPERS)
def test_every_value_names_its_source(study):
    place = ROOT / "pipelines" / study
    for path in (place / "overlay.yaml", place / "presets.yaml"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            directive = line.startswith(("whole:", "stages:"))
            bare = (
                not line.strip()
                or line.lstrip().startswith("#")
                or re.fullmatch(r"\s*\w+:( &\w+)?", line)
            )
            bare = bare or directive or re.fullmatch(r"\s*\w+: +# .*|  \{.*|\s*\w+: \{", line)
            assert bare or re.search(r"\s# \S", line), (
                f"{path}:{number}: no comment says where this value comes from"
            )


@pytest.mark.parametrize(("study", "name"), [(study, names[0]) for study, names in EACH if names])
def test_a_preset_changes_something(study, name):
    assert data_of(study, (name,)) != data_of(study)


@pytest.mark.parametrize(("study", "names"), ALTERNATIVES)
def test_of_alternative_presets_the_last_one_counts(study, names):
    for first in names:
        for last in names:
            assert data_of(study, (first, last)) == data_of(study, (last,)), (
                f"{first} leaves something behind under {last}"
            )


@pytest.mark.parametrize("study", PAPERS)
def test_the_readme_names_what_there_is(study):
    text = (ROOT / "pipelines" / study / "README.md").read_text(encoding="utf-8")
    assert "Not run here" in text
    for words in re.findall(
        r"^moecore study preset pipelines/(\w+ [^#\n]*?)\s*#", text, re.MULTILINE
    ):
        name, *given = words.split()
        assert name == study and set(given) <= set(load_presets(ROOT / "pipelines" / study))


# What the papers' tables print, typed from them and not from the files.
PAPER = {
    "prc table 1": (
        "prc",
        (),
        {
            "model.depth": 8,
            "model.width": 512,
            "model.patch": 32,
            "methods.vmoe.blocks": [5, 7],
            "methods.prc.blocks": [5, 7],
            "data.pretrain.size": 224,
            "data.finetune.size": 384,
            "pretrain.learning_rate": 5e-4,
            "pretrain.optimizer": {"kind": "adam"},
            "finetune.learning_rate": 5e-4,
            "finetune.optimizer": {"kind": "sgd", "momentum": 0.9},
            "methods.prc.experts.number": 8,
            "methods.vmoe.regularizers": [
                {"kind": "importance", "weight": 5e-3},
                {"kind": "load", "weight": 5e-3},
            ],
            "methods.prc.regularizers": [
                {
                    "kind": "pairwise_consistency",
                    "diagonal": 5e-3,
                    "off_diagonal": 5e-2,
                    "special": True,
                }
            ],
            "methods.prc.router.k": 2,
            "finetune.k": None,
            "run.seeds": [0, 1, 2],
        },
    ),
    "prc, V-MoE's decay": (
        "prc",
        ("decay",),
        {"pretrain.optimizer": {"kind": "adamw"}, "pretrain.weight_decay": 0.1},
    ),
    "prc table 3": (
        "prc",
        ("flowers", "top_1"),
        {"methods.prc.router.k": 2, "finetune.k": 1, "data.finetune.size": 384},
    ),
    "tgr table S8, Tiny": (
        "tgr",
        (),
        {
            "model.width": 192,
            "model.heads": 3,
            "model.depth": 12,
            "methods.tgr.blocks": [7, 9, 11],
            "methods.tgr.experts.number": 16,
            "pretrain.epochs": 300,
            "finetune.epochs": 100,
            "pretrain.warmup_epochs": 5,
            "data.pretrain.size": 224,
            "data.finetune.size": 224,
            "teacher.name": "deit3_small_patch16_224.fb_in22k_ft_in1k",
            "methods.tgr.regularizers": [{"kind": "router_kl", "weight": 5.0}],
            "methods.tgr.teacher_router": {
                "features": "mlp_input",
                "load": 0.005,
                "entropy": 0.005,
                "fit": "joint",
            },
        },
    ),
    "tgr table S8, Small": (
        "tgr",
        ("small",),
        {
            "model.width": 384,
            "model.heads": 6,
            "methods.tgr.experts.number": 8,
            "teacher.name": "deit3_base_patch16_224.fb_in22k_ft_in1k",
        },
    ),
    "tgr table S8, Base": (
        "tgr",
        ("base", "pets"),
        {
            "model.width": 768,
            "model.heads": 12,
            "methods.vmoe.experts.number": 8,
            "teacher.name": "deit3_base_patch16_224.fb_in22k_ft_in1k",
            "finetune.epochs": 100,
        },
    ),
    "tgr table 4": (
        "tgr",
        ("experts_128",),
        {"methods.tgr.experts.number": 128, "methods.vmoe.experts.number": 128, "model.width": 192},
    ),
    "moge tables 8 and 9, CIFAR-100": (
        "moge",
        (),
        {
            "pretrain.batch": 128,
            "pretrain.learning_rate": 1e-3,
            "pretrain.weight_decay": 0.05,
            "pretrain.warmup_epochs": 10,
            "pretrain.epochs": 150,
            "pretrain.views.flip": True,
            "pretrain.mix": {"mixup": 0.25, "cutmix": 0.25},
            "pretrain.views.erasing": 0.25,
            "pretrain.label_smoothing": 0.1,
            "pretrain.clip": None,
            "data.pretrain.size": 32,
            "pretrain.views.jitter": {"brightness": 0.12, "contrast": 0.12, "saturation": 0.12},
            "model.drop_path": 0.1,
            "model.patch": 4,
            "model.width": 512,
            "model.depth": 8,
            "model.heads": 8,
            "methods.moge.experts.number": 32,
            "methods.moge.router.k": 1,
        },
    ),
    "moge tables 8 and 9, Tiny-ImageNet": (
        "moge",
        ("tiny_imagenet",),
        {
            "pretrain.batch": 128,
            "pretrain.learning_rate": 1e-3,
            "pretrain.warmup_epochs": 10,
            "pretrain.epochs": 150,
            "pretrain.mix": {"mixup": 0.25, "cutmix": 0.25},
            "pretrain.clip": None,
            "data.pretrain.size": 64,
            "pretrain.views.jitter": {"brightness": 0.15, "contrast": 0.15, "saturation": 0.15},
            "model.drop_path": 0.1,
            "model.patch": 8,
            "model.width": 512,
        },
    ),
    "moge tables 8 and 9, ImageNet-1K": (
        "moge",
        ("imagenet",),
        {
            "pretrain.batch": 1024,
            "pretrain.learning_rate": 5e-4,
            "pretrain.warmup_epochs": 15,
            "pretrain.epochs": 150,
            "pretrain.views.flip": False,
            "pretrain.mix": {"mixup": 0.8, "cutmix": 1.0},
            "pretrain.clip": 5.0,
            "pretrain.weight_decay": 0.05,
            "data.pretrain.size": 224,
            "pretrain.views.jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
            "model.drop_path": 0.0,
            "model.patch": 16,
            "model.width": 512,
            "model.depth": 8,
            "model.heads": 8,
        },
    ),
    "moge tables 8 and 9, fine-tuning": (
        "moge",
        ("imagenet_upcycled",),
        {
            "pretrain.batch": 256,
            "pretrain.learning_rate": 3e-5,
            "pretrain.warmup_epochs": 5,
            "pretrain.epochs": 30,
            "pretrain.views.flip": False,
            "pretrain.mix": {"mixup": 0.8, "cutmix": 1.0},
            "pretrain.clip": 5.0,
            "pretrain.weight_decay": 1e-8,
            "pretrain.label_smoothing": 0.1,
            "data.pretrain.size": 224,
            "pretrain.views.jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
            "model.drop_path": 0.0,
            "model.patch": 16,
            "model.width": 384,
            "model.depth": 12,
            "model.heads": 6,
            "methods.moge.blocks": [9, 11],
        },
    ),
    "moge table 9, SwinV2-MoGE on CIFAR-100": (
        "moge",
        ("swin",),
        {
            "model.kind": "swin_moe",
            "model.patch": 2,
            "model.width": 96,
            "model.depths": [2, 2, 6, 2],
            "model.heads": [3, 6, 12, 24],
            "model.window": 4,
            "model.drop_path": 0.1,
            "methods.moge.experts.number": 32,
            "methods.moge.router.k": 1,
        },
    ),
    "moge tables 4 and 9, SwinV2-MoGE on Tiny-ImageNet": (
        "moge",
        ("tiny_imagenet", "swin_tiny_imagenet", "experts_128", "top_2"),
        {
            "model.patch": 4,
            "model.window": 7,
            "data.pretrain.size": 64,
            "methods.vmoe.experts.number": 128,
            "methods.moge.router.k": 2,
        },
    ),
    "moge tables 4 and 9, SwinV2-MoGE on ImageNet-1K": (
        "moge",
        ("imagenet", "swin_imagenet", "experts_64"),
        {
            "data.pretrain.size": 192,
            "model.window": 12,
            "model.drop_path": 0.1,
            "pretrain.batch": 1024,
            "methods.moge.experts.number": 64,
            "methods.moge.blocks": [9, 11],
        },
    ),
    "moge tables 4 and 9, SwinV1-MoGE, fine-tuned": (
        "moge",
        ("imagenet_upcycled", "swin_b_upcycled"),
        {
            "data.pretrain.size": 224,
            "model.kind": "swin",
            "model.width": 128,
            "model.depths": [2, 2, 18, 2],
            "model.window": 7,
            "methods.moge.experts.number": 128,
            "methods.moge.upcycle": True,
        },
    ),
    "moge table 6, ViT-B": (
        "moge",
        ("tiny_imagenet", "vit_b"),
        {
            "model.patch": 8,
            "model.width": 768,
            "model.depth": 12,
            "model.heads": 12,
            "methods.moge.blocks": [9, 11],
            "methods.moge.experts.number": 32,
        },
    ),
    "swin-moe's repository, S with 8 experts": (
        "moge",
        ("imagenet", "swin_moe_s"),
        {
            "data.pretrain.size": 192,
            "model.kind": "swin_moe",
            "model.width": 96,
            "model.depths": [2, 2, 18, 2],
            "model.window": 12,
            "methods.vmoe.experts": {"kind": "mlp", "number": 8, "hidden_ratio": 4, "dropout": 0.1},
            "methods.vmoe.router.k": 1,
            "methods.vmoe.router.capacity_factor": 1.25,
            "methods.vmoe.regularizers": [  # 0.01 of their mean
                {"kind": "importance", "weight": 5e-3},
                {"kind": "load", "weight": 5e-3},
            ],
            "methods.vmoe.blocks": [5, 7, 9, 11, 13, 15, 17, 19, 21, 23],
            "pretrain.epochs": 90,
            "pretrain.batch": 4096,
            "pretrain.learning_rate": 1e-3,
            "pretrain.weight_decay": 0.1,
            "pretrain.clip": 3.0,
        },
    ),
    "swin-moe's repository, B with 32 experts": (
        "moge",
        ("imagenet", "swin_moe_b"),
        {
            "model.width": 128,
            "model.heads": [4, 8, 16, 32],
            "model.drop_path": 0.3,
            "methods.vmoe.experts.number": 32,
            "methods.vmoe.router.capacity_factor": 1.25,
            "pretrain.weight_decay": 0.1,
            "pretrain.clip": 3.0,
        },
    ),
    "ermoe sections 6 to 10": (
        "ermoe",
        (),
        {
            "methods.ermoe.router.k": 2,
            "methods.ermoe.router.threshold": 0.5,
            "methods.ermoe.experts.number": 8,
            "finetune.shots": 5,
            "methods.ermoe.regularizers": [{"kind": "orthogonality", "weight": 5e-5}],
            "model.patch": 16,
            "model.width": 768,
            "data.pretrain.size": 224,
        },
    ),
}


@pytest.mark.parametrize("place", PAPER)
def test_values_are_the_papers(place):
    study, names, expected = PAPER[place]
    data = data_of(study, names)
    assert {
        key: reduce(lambda value, word: value[word], key.split("."), data) for key in expected
    } == expected


@pytest.mark.parametrize(
    ("names", "weight", "end"),  # table 9, rows λ and σ_min; σ_0 and γ are 10 and 0.3 everywhere
    [
        ((), 4e-3, 1.5),
        (("tiny_imagenet",), 4e-3, 1.5),
        (("imagenet",), 5e-5, 0.5),
        (("imagenet_upcycled",), 4e-7, 0.5),
        (("swin",), 4e-3, 1.5),
        (("tiny_imagenet", "swin_tiny_imagenet"), 4e-3, 1.5),
        (("imagenet", "swin_imagenet"), 4e-3, 0.5),
        (("imagenet_upcycled", "swin_upcycled"), 4e-7, 0.5),
    ],
)
def test_group_sparsity_of_moge(names, weight, end):
    methods = data_of("moge", names)["methods"]
    sparsity = {
        "kind": "group_sparsity",
        "weight": weight,
        "size": 3,
        "sigma_start": 10,
        "sigma_end": end,
        "exponent": 0.3,
        "reduction": "authors",  # λ as it is printed
    }
    assert methods["moge"]["regularizers"] == [*methods["vmoe"]["regularizers"], sparsity]
    assert {**methods["moge"], "regularizers": 0} == {
        **methods["vmoe"],
        "regularizers": 0,
    }  # section 3.1: all else is unchanged


TABLE_5 = {  # each method's σ_0, σ_min and γ; None where they are the paper's own
    "moge": (10, 1.5, 0.3),
    "moge_sigma_3": (3, 3, None),
    "moge_sigma_2_5": (2.5, 2.5, None),
    "moge_sigma_2": (2, 2, None),  # the row γ = 0, too
    "moge_sigma_1_5": (1.5, 1.5, None),
    "moge_gamma_3": (10, 2, 3),
    "moge_gamma_1": (10, 2, 1),
    "moge_end_2": (10, 2, 0.3),
    "moge_end_1": (10, 1, 0.3),
    "moge_end_0_5": (10, 0.5, 0.3),
}


def test_table_5_of_moge_varies_the_gaussian_and_nothing_else():
    data = data_of("moge", ("table_5_sigma",))
    methods = data["methods"]
    assert (
        data["run"]["methods"] == ["vmoe", *TABLE_5]
        and data["model"] == (data_of("moge", ("swin",))["model"])
    )
    for name, (start, end, exponent) in TABLE_5.items():
        *others, found = methods[name]["regularizers"]
        assert {**methods[name], "regularizers": others} == methods["vmoe"]
        assert (found["sigma_start"], found["sigma_end"]) == (start, end)
        assert exponent in (None, found["exponent"]) and found["weight"] == 4e-3
    methods = data_of("moge", ("tiny_imagenet", "experts_128", "table_5_filter"))["methods"]
    filters = {"moge": "3g", "moge_5g": "5g", "moge_3a": "3a", "moge_5a": "5a"}
    for name, row in filters.items():
        *others, found = methods[name]["regularizers"]
        assert {**methods[name], "regularizers": others} == methods["vmoe"]
        assert f"{found['size']}{found.get('filter', 'gaussian')[0]}" == row


def millions(study: str, names: tuple[str, ...], method: str, folder) -> float:
    settings = check_params(folder(study, names) / "params.yaml")
    image = ImageSpec(
        channels=3,
        size=224,
        task=Classification(classes=tuple(map(str, range(1000)))),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    with torch.device("meta"):
        model = settings.model.build(image, settings.methods[method].moe)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("names", "count"), [((), 19.23), (("small",), 47.26), (("base",), 186.53)]
)
def test_tgr_models_have_as_many_parameters_as_table_s9_says(folder, names, count):
    # By hand, Tiny: DeiT-Ti with distillation token 5.911 M; 3 layers get 15 more MLPs of
    # 2·192·768 + 768 + 192 = 295,872 and a 16 × 192 router.
    assert millions("tgr", names, "vmoe", folder) == pytest.approx(count, abs=0.006)


@pytest.mark.parametrize(
    ("method", "count", "tolerance"), [("vmoe", 284.9, 0.06), ("ermoe", 243.0, 0.05)]
)
def test_ermoe_models_are_near_table_s2(folder, method, count, tolerance):
    # ViT-B/16 86.57 M + 6 layers · (7 more MLPs of 4,722,432 + an 8 × 768 router) = 284.94 M.
    # The paper gives no rank. An expert with W1 = U diag(s) Bᵀ has r (768 + 1 + 3072) + 3072 of it
    # and 3072 · 768 + 768 of W2: 48 such and 58.23 M besides are 243.01 M with r = 387.
    assert millions("ermoe", (), method, folder) == pytest.approx(count, abs=tolerance)
