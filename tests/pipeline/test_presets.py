"""Every preset is right and builds its models; ermoe/brain_age at a tiny size; drawn studies."""

# Presets need no training and no data: models are built without memory (torch's meta device).

import json
import os
import re
from contextlib import chdir
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from paper_models.sizes import PaperModel, count_sized_model
from pydantic import TypeAdapter

from moecore.brain import age_predictions as brain_out_of_fold
from moecore.core.config import builtin_kinds
from moecore.core.source_layout import ROOT
from moecore.measure.base import SkipReason, read_result
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import (
    Backbone,
    BackboneModel,
    ImageSpec,
    count_total_and_active_parameters,
)
from moecore.nn.predict import meta_device_context
from moecore.parts import Classification, Experts, Regularizer, Router
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.pipeline.run_folders import write_dvc_yaml_files
from moecore.report.tables.cells import REPORTED_MODELS
from moecore.stages import calibrate as calibrate_stage
from moecore.stages import compare, measure, out_of_fold, prepare, pretrain, teacher, teacher_router
from moecore.stages import robustness as robustness_stage
from moecore.study.questions import QuestionFile
from moecore.tasks.regression import Regression
from moecore.training.meter import LiveBytesCounter
from moecore.training.method import Method
from moecore.training.outcome import Outcome
from tests import forked
from tests.data.making import VOLUMES
from tests.project import check_params, compose_shipped, write_question
from tools.draw_study import WORLDS, StudyDrawer, write_raw_data
from tools.fuzz_studies import is_accepted, list_stage_commands

PAGE = (ROOT / "docs/brain_preprocessing.md").read_text(encoding="utf-8")
PAPERS = ("prc", "tgr", "moge", "ermoe")
DIRECTIVES = tuple(f"{name}:" for name in ("whole", "stages", "question", "answer", "world", "was"))
TOGETHER = [  # combinations that the READMEs name
    *(("prc", ("flowers", "top_1")), ("tgr", ("base", "cifar10")), ("tgr", ("pets", "unguided"))),
    ("moge", ("tiny_imagenet", "swin_tiny_imagenet", "experts_128", "top_2")),
    ("moge", ("imagenet", "swin_imagenet", "experts_64")),
    *(("moge", ("imagenet_upcycled", "swin_b_upcycled")), ("moge", ("imagenet", "swin_moe_b"))),
    *(("moge", ("tiny_imagenet", "vit_b")), ("ermoe", ("tiny_imagenet", "top_4"))),
    *(("ermoe", ("one_layer", "experts_32")), ("adversarial", ("imagenet",))),
]
ALTERNATIVES = [
    *(("prc", ("imagenet", "cifar10", "flowers")), ("tgr", ("small", "base"))),
    ("tgr", ("cifar10", "pets")),
    ("tgr", ("experts_4", "experts_32", "experts_64", "experts_128")),
    *(("moge", ("tiny_imagenet", "imagenet")), ("moge", ("top_2", "top_5", "top_9"))),
    *(("moge", ("swin_moe_s", "swin_moe_b")), ("ermoe", ("tiny_imagenet", "cifar10"))),
    ("ermoe", ("top_1", "top_3", "top_4", "top_6")),
]


def colour_images(size: int, classes: int) -> ImageSpec:
    task = Classification(classes=tuple(map(str, range(classes))))
    return ImageSpec(channels=3, size=size, task=task, mean=(0.5,) * 3, std=(0.5,) * 3)


def question_of(study: str) -> str:
    return {"adversarial": "adversarial/all_figures"}.get(study, f"{study}/paper_scale")


def data_of(study: str, names: tuple[str, ...] = ()) -> dict:
    return compose_shipped(question_of(study), names).document.data


@pytest.fixture
def folder(tmp_path):
    def write(study: str, names: tuple[str, ...] = ()) -> Path:
        name = question_of(study) if "/" not in study else study
        return write_question(tmp_path / ".runs" / study, name, names).parent

    return write


@pytest.mark.parametrize(
    ("study", "names"),
    [(study, ()) for study in PAPERS] + TOGETHER,
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "base",
)
def test_studies_and_presets_over_each_other_are_in_order_and_build(folder, study, names):
    settings = check_params(folder(study, names) / "params.yaml")
    for phase in settings.run.phases:
        source = settings.data[phase]
        image = colour_images(source.size, 2)
        for method in settings.methods.values():
            sized = method.merge_model_settings(settings.model)
            with torch.device("meta"):
                assert sized.build(image, method.moe).image.size == source.size


@pytest.mark.parametrize("study", PAPERS)
def test_every_value_names_its_source(study):
    place = ROOT / "pipelines"
    for path in (place / study / "paper_scale.yaml", place / "worlds/paper_scale.yaml"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            directive = line.startswith(DIRECTIVES)
            bare = (
                not line.strip()
                or line.lstrip().startswith("#")
                or re.fullmatch(r"\s*\w+:( &\w+)?", line)
            )
            bare = bare or directive or re.fullmatch(r"\s*\w+: +# .*|  \{.*|\s*\w+: \{", line)
            where = f"{path}:{number}"
            assert bare or re.search(r"\s# \S", line), f"{where}: no comment gives its source"


@pytest.mark.parametrize(("study", "names"), ALTERNATIVES)
def test_of_alternative_presets_the_last_one_counts(study, names):
    for last in names:
        others = [name for name in names if name != last]
        assert data_of(study, (*others, last)) == data_of(study, (last,)), last


@pytest.mark.parametrize("study", [*PAPERS, "adversarial"])
def test_the_readme_names_what_there_is(study):
    text = (ROOT / "pipelines" / study / "README.md").read_text(encoding="utf-8")
    assert "Not run here" in text or "not run here" in text
    commands = re.findall(r"^moecore study preset (\w+/\w+ ?[^#\n]*?)\s*(?:#|$)", text, re.M)
    assert commands
    for words in commands:
        name, *given = [word for word in words.split() if not word.startswith("-") and word != "1"]
        assert set(given) <= set(QuestionFile(ROOT, name).presets), words


def millions(study: str, names: tuple[str, ...], method: str, folder) -> float:
    settings = check_params(folder(study, names) / "params.yaml")
    image = colour_images(224, 1000)
    with torch.device("meta"):
        model = settings.model.build(image, settings.methods[method].moe)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("study", "names", "method", "count", "tolerance"),
    [
        ("tgr", (), "vmoe", 19.23, 0.006),
        ("tgr", ("small",), "vmoe", 47.26, 0.006),
        ("tgr", ("base",), "vmoe", 186.53, 0.006),
        *(("ermoe", (), "vmoe", 284.9, 0.06), ("ermoe", (), "ermoe", 243.0, 0.05)),
    ],
)
def test_parameters_are_those_of_tables_s9_and_s2(folder, study, names, method, count, tolerance):
    # TGR's S9 by hand, Tiny: DeiT-Ti with distillation token 5.911 M; 3 layers get 15 more MLPs of
    # 2·192·768 + 768 + 192 = 295,872 and a 16 × 192 router.
    # ERMoE's S2: ViT-B/16 86.57 M + 6 layers · (7 more MLPs of 4,722,432 + an 8 × 768 router) =
    # 284.94 M. The paper gives no rank. An expert with W1 = U diag(s) Bᵀ has r (768 + 1 + 3072) +
    # 3072 of it and 3072 · 768 + 768 of W2: 48 such and 58.23 M besides are 243.01 M with r = 387.
    assert millions(study, names, method, folder) == pytest.approx(count, abs=tolerance)


def test_the_models_under_attack_are_near_table_1(folder):
    settings = check_params(folder("adversarial", ("imagenet",)) / "params.yaml")
    printed = {one.model: one.values for one in REPORTED_MODELS if one.paper == "cost"}
    for name in settings.run.methods:
        number = name.rpartition("_")[2]
        titles = {"dense": "ViT-B/32", "dense_big": "ViT-B++/32"}
        title = titles.get(name, f"V-MoE-B/32, {number} experts")
        method = settings.methods[name]
        sized = method.merge_model_settings(settings.model)
        sizes = {"size": 224, "classes": 18291}
        counts = count_sized_model(PaperModel(name=name, model=sized, method=method, **sizes))
        # The authors' ViT has one layer more before its head; XLA counts empty seats of experts.
        assert counts["parameters"] == pytest.approx(printed[title]["parameters"], rel=0.007)
        assert counts["gflops"] == pytest.approx(printed[title]["gflops"], rel=0.06)


def test_models_of_the_other_papers_sizes_are_built(folder):
    ages = check_params(folder("ermoe/brain_age", ("adni",)) / "params.yaml")
    spec = {"channels": 1, "size": ages.data["pretrain"].size, "mean": (0.5,), "std": (0.5,)}
    volume = ImageSpec(**spec, task=Regression(target="age"))
    with torch.device("meta"):
        model = ages.model.build(volume, ages.methods["ermoe"].moe)
    assert model.layout.grid == (6, 7, 6) and len(model.moe.indices(model.depth)) == 6
    pairs = check_params(folder("ermoe/image_text", ("clip_b16", "section_14")) / "params.yaml")
    tuned, frozen = (pairs.methods[name] for name in pairs.run.methods)
    assert tuned.moe == frozen.moe and tuned.upcycle and frozen.text.frozen == "always"


@pytest.mark.parametrize("name", ["sfcn", "ermoe"])
def test_a_step_of_volumes_of_1_mm_fits_a_gpu(name):
    study = compose_shipped("ermoe/brain_age", ("one_mm",)).document.data
    method = Method.model_validate(study["methods"][name])
    backbone = method.merge_model_settings(TypeAdapter(Backbone).validate_python(study["model"]))
    image = VOLUMES.model_copy(update={"size": tuple(study["data"]["pretrain"]["size"])})
    with meta_device_context():
        model = backbone.build(image, method.moe).train()
        kept = kept_bytes(model, 2) - kept_bytes(model, 1)  # for the backward pass, per volume
    parameters = count_total_and_active_parameters(model)["parameters"]
    memory = 16 * parameters + study["pretrain"]["batch"] * kept  # fp32 weights, gradients, Adam's
    row = re.search(rf"^\| `{name}`.*$", PAGE, re.MULTILINE)[0].split("|")
    assert row[2].strip() == f"{parameters:,}" and row[4].strip() == f"{kept / 1e9:.2f} GB"
    assert row[5].strip() == f"{memory / 1e9:.1f} GB" and memory < 40e9


def kept_bytes(model: BackboneModel, number: int) -> int:
    """Bytes that a forward pass of ``number`` volumes holds at its end."""
    image = model.image
    volumes = torch.empty(number, image.stored_channels, *image.shape, device="meta")
    with LiveBytesCounter() as live:
        output = model(volumes)
        held_bytes = live.now
    del output
    return held_bytes


ENVIRONMENT = {"MOECORE_THREADS": "1", "MOECORE_DEVICE": "cpu"}
NOT_DRAWN = {"folded"}  # the stage merge writes it


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return write_raw_data(tmp_path_factory.mktemp("raw"))


@pytest.mark.parametrize("first", [19, 600])
def test_an_accepted_study_runs_to_its_end(first, raw, tmp_path):
    for seed in count(first):
        study = tmp_path / str(seed)
        study.mkdir()
        drawer = StudyDrawer(seed, raw)
        if drawer.name != "volumes" and is_accepted(drawer.draw_study(), seed, study):
            break
    with chdir(study):
        write_all_hashes("params.yaml")
    commands = list(list_stage_commands(study))
    assert commands[0] == ["code"] and commands[-1] == ["compare"]
    for words in commands[1:]:
        done = forked.run(study, words, os.environ | ENVIRONMENT)
        assert done.returncode == 0, f"seed {seed}: {words}\n{done.stderr}"


def test_every_part_is_drawn(raw):
    drawn: dict[str, set[str]] = {"router": set(), "experts": set(), "regularizers": set()}
    worlds, models = set(), set()
    for seed in range(300):
        drawer = StudyDrawer(seed, raw)
        study = drawer.draw_study()
        worlds.add(drawer.name)
        models.add(study["model"]["kind"])
        for method in study["methods"].values():
            for key in ("router", "experts"):
                drawn[key] |= {method[key]["kind"]} if key in method else set()
            drawn["regularizers"] |= {loss["kind"] for loss in method.get("regularizers", ())}
    assert worlds == set(WORLDS) and models == set(builtin_kinds(Backbone))
    for key, family in (("router", Router), ("experts", Experts), ("regularizers", Regularizer)):
        assert drawn[key] == set(builtin_kinds(family)) - NOT_DRAWN


RESULTS = dict.fromkeys(("calibrate", "robustness", "routing", "cohort_checks"), Found)
RESULTS["out_of_fold"] = brain_out_of_fold.OutOfFoldMae
STUDY = "ermoe/brain_age"
METHODS = ("dense", "ermoe")
SMALL = {
    "run": {"methods": list(METHODS), "seeds": [0], "phases": ["pretrain"]},
    "data": {"pretrain": {"kind": "phantom", "subjects": 16, "age_groups": 2}},
    "model": {"kind": "vit3d", "patch": 16, "width": 16, "depth": 4, "heads": 2, "mlp_ratio": 1},
    "teacher_router": {"steps": 1, "batch": 4, "learning_rate": 0.01},
    "cohort_checks": {
        "subjects": 2,
        "ages": [25, 50, 80],
        "rescans": 2,
        "generalisation": {"volumes": 2, "subjects": 2},
    },
    "claims": [],
    "questions": [],
}


def small() -> str:
    """The study's params.yaml, smaller; one of two epochs is the region experts' warm start."""
    params = compose_shipped(STUDY).document.data | SMALL
    params["pretrain"] |= {"epochs": 2, "batch": 4, "warmup_epochs": 0}
    params["pretrain"] |= {"log_every": 1, "checkpoint_every": 2}
    for method in params["methods"].values():
        if "regions" in method:
            method["regions"] |= {"after": 0, "warm_start_epochs": 1}
    attacks = [{"kind": "fgsm", "inside": True}, {"kind": "pgd", "inside": True, "steps": 2}]
    sweeps = {"k": [1, 2], "threshold": [0.5], "images": 2}
    params["routing"] |= {"images": 3, "overlays": 1, "augmentation_images": 2, "sweeps": sweeps}
    params["routing"]["augmentations"] = ["identity", "affine"]
    params["robustness"] |= {"images": 4, "epsilons": [0.05], "attacks": attacks}
    params["robustness"]["audit"] = {"images": 2, "steps": 2}
    return yaml.safe_dump(params, sort_keys=False)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("brain_age")
        patch.chdir(folder)
        patch.setenv("MOECORE_THREADS", "1")
        patch.delenv("MOECORE_PARAMS", raising=False)
        (folder / "params.yaml").write_text(small(), encoding="utf-8")
        write_dvc_yaml_files(folder, compose_shipped(STUDY).stages)
        write_all_hashes("params.yaml")
        prepare.prepare("pretrain")
        teacher.teacher(0)
        for method in METHODS:
            teacher_router.teacher_router(method, 0)
            pretrain.pretrain(method, 0)
            out_of_fold.out_of_fold(method, 0)
            calibrate_stage.calibrate("pretrain", method, 0)
            robustness_stage.robustness("pretrain", method, 0)
            for what in ("routing", "cohort_checks"):
                measure.measure(what, "pretrain", method, 0)
        compare.compare()
        yield folder


def measured(study: Path, stage: str, method: str):
    if stage == "pretrain":
        return read_result(study / f"artifacts/measured/pretrain/{method}/0.json", Outcome, stage)
    path = study / f"artifacts/measured/{stage}/pretrain/{method}/0.json"
    return read_result(path, RESULTS[stage], stage)


def test_the_cohort_is_called_simulated(study):
    card = json.loads((study / "artifacts/data/pretrain/card.json").read_text())
    assert card["simulated"] is True and "imulated" in card["name"]
    assert card["task"]["target"] == "age" and card["size"] == [64, 64, 64]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_through_all_stages(study, method):
    assert measured(study, "pretrain", method).test_score.value > 0
    calibrated = measured(study, "calibrate", method)
    assert calibrated.find("mae_raw").value > 0 and calibrated.find("median_mae").value > 0
    assert isinstance(measured(study, "out_of_fold", method), SkipReason)
    attacked = measured(study, "robustness", method)
    whole = measured(study, "cohort_checks", method).find("whole_mae").value
    assert attacked.find("clean").value == pytest.approx(whole, rel=1e-4), "the same test volumes"
    routed = measured(study, "routing", method)
    if method == "dense":
        assert isinstance(routed, SkipReason), "it has no experts"
    else:
        assert len(routed.facts["load"]) == 2
    assert (study / f"artifacts/calibrate/pretrain/{method}/0/predictions.csv").stat().st_size > 100


def test_subjects_are_aged_and_scanned_again_and_experts_tried_where_not_taught(study):
    found = measured(study, "cohort_checks", "ermoe")
    assert found.facts["not_checked"] == {}
    assert all(found.find(f"isolated_{name}") for name in ("wm", "gm", "csf"))
    assert np.shape(found.facts["ageing"]["predictions"]) == (2, 3)
    assert found.find("rescan").value > 0
    assert len(found.all("mixture_agreement")) == 6 * 3, "pairs of tissues, shares of the second"
    assert found.find("whole_people").value == found.find("other_generator_people").value == 2
    dense = measured(study, "cohort_checks", "dense")
    assert dense.find("whole_agreement") is None
    assert "no region experts" in dense.facts["not_checked"]["generalisation"]


def test_the_report_has_every_method(study):
    page = (study / "reports/index.html").read_text(encoding="utf-8")
    assert all(method in page for method in METHODS) and "imulated" in page
