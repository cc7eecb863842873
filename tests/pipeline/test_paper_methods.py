"""The papers' training details by stages: joint routers, distillation, upcycling, two views."""

import json

import pytest

from moecore.measure.base import read_result
from moecore.training.outcome import Outcome
from tests.project import PARAMS, Project

METHODS = """\
methods:
  joint:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
    regularizers: [{kind: router_kl, weight: 5.0}]
    teacher_router: {fit: joint}
  oracle:
    router: {kind: teacher_routed, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
    regularizers: [{kind: router_kl, weight: 5.0}]
    teacher_router: {fit: joint}
  distilled:
    distillation: 0.5
  upcycled:
    router: {kind: noisy_top_k, k: 2, renormalise: true}
    experts: {kind: mlp, number: 4, hidden_ratio: 2}
    upcycle: true
  ermoe_prc:
    router: {kind: eigenbasis, k: 2}
    experts: {kind: eigen, number: 4, hidden_ratio: 1}
    regularizers: [{kind: orthogonality, weight: 5.0e-5}, {kind: pairwise_consistency}]
"""
NAMES = ("joint", "oracle", "distilled", "upcycled", "ermoe_prc")


@pytest.fixture(scope="module")
def project(finished, tmp_path_factory) -> Project:
    """All five methods pretrained on the finished project's data; fine-tuned with k = 1."""
    start, end = PARAMS.index("methods:\n  dense"), PARAMS.index("teacher:\n")
    text = PARAMS[:start] + METHODS + PARAMS[end:]
    text = text.replace("methods: [dense, vmoe, tgr]", f"methods: [{', '.join(NAMES)}]").replace(
        "shots: 20}", "shots: 20, k: 1, guided: true}"
    )
    made = finished.copy(tmp_path_factory.mktemp("papers") / "project")
    made.write(text)
    for name in NAMES:
        made.stage("teacher_router", name, "0")
        made.stage("pretrain", name, "0")
        made.stage("finetune", "finetune", name, "0")
    for name in ("joint", "oracle"):
        made.stage("measure", "routing", "pretrain", name, "0")
    return made


def measured(project: Project, stage: str, name: str) -> dict:
    return json.loads((project.folder / f"artifacts/measured/{stage}/{name}/0.json").read_text())


def trained(project: Project, stage: str, name: str) -> Outcome:
    path = project.folder / f"artifacts/measured/{stage}/{name}/0.json"
    return read_result(path, Outcome, stage)


@pytest.mark.parametrize("name", NAMES)
def test_both_trainings_report_what_they_reached(project, name):
    for stage in ("pretrain", "finetune"):
        assert 0 <= trained(project, stage, name).test_score.value <= 1
    if name != "distilled":
        moved = trained(project, "pretrain", name)
        assert len(moved.agreement_with_final) == 2
        assert moved.agreement_with_final[-1] == 1.0
        assert len(moved.agreement_consecutive) == 1


def test_a_joint_teacher_router_is_kept_beside_the_model_and_differs_from_the_drawn_one(project):
    drawn = project.folder / "artifacts/teacher_router/joint/0/routers.safetensors"
    learned = project.folder / "artifacts/pretrain/joint/0/guide/routers.safetensors"
    assert drawn.read_bytes() != learned.read_bytes()
    (agreement,) = numbers(measured(project, "routing/pretrain", "joint"), "teacher_agreement")
    assert 0 <= agreement <= 1


def test_the_upper_bound_agrees_with_its_own_teacher_where_it_decides(project):
    settings = json.loads((project.folder / "artifacts/pretrain/oracle/0/model.json").read_text())
    teacher = project.folder / "artifacts/pretrain/oracle/0/guide/teacher/model.safetensors"
    assert settings["guided"] and teacher.exists()
    routing = measured(project, "routing/pretrain", "oracle")
    assert numbers(routing, "teacher_agreement") == [1]
    assert numbers(routing, "tail_of_probs")[0] < 0.5, (
        "the two best of its own four probabilities are chosen"
    )


def test_fine_tuning_uses_the_other_k(project):
    card = (project.folder / "artifacts/finetune/upcycled/0/model.json").read_text()
    assert json.loads(card)["moe"]["router"]["k"] == 1


def test_distillation_is_logged_and_upcycling_starts_from_the_teacher(project):
    history = (project.folder / "artifacts/history/pretrain/distilled/0").glob("**/*.jsonl")
    assert '"distillation"' in "".join(path.read_text() for path in history)
    # the teacher's weights give a head start: after the same steps the upcycled model is ahead of
    # one that started from nothing
    ahead = trained(project, "pretrain", "upcycled").test_score.value
    assert ahead > trained(project, "pretrain", "joint").test_score.value


SWIN = "model: {kind: swin_moe, patch: 2, width: 16, depths: [2, 2], heads: [1, 2], window: 4}"
ON_IMAGES = ("invariance", "corruptions", "stability", "few_shot", "lipschitz", "cost", "explorer")


@pytest.fixture(scope="module")
def on_swin(finished, tmp_path_factory) -> Project:
    """A Swin-MoE, grid 12 when fine-tuned (three windows of 4), which everything measured."""
    vit = "model: {kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}"
    text = PARAMS.replace(vit, SWIN).replace("[dense, vmoe, tgr]", "[dense, vmoe]")
    text += "few_shot: {shots: [1, 5], draws: 2}\n"
    text += "explorer: {images: 4, attack: {kind: pgd, steps: 2}}\n"
    made = finished.copy(tmp_path_factory.mktemp("swin") / "project")
    made.write(text)
    item = ("finetune", "vmoe", "0")
    for words in (
        *(
            (stage, name, "0")
            for name in ("vmoe", "dense")
            for stage in ("teacher_router", "pretrain")
        ),
        ("finetune", *item),
        ("finetune", "finetune", "dense", "0"),
        ("calibrate", *item),
        ("robustness", *item),
        ("transfer", "finetune", "0"),
        ("measure", "routing", *item),
        *(("measure", name, *item) for name in ON_IMAGES),
    ):
        made.stage(*words)
    return made


def numbers(found: dict, metric: str) -> list[float]:
    """Return the values of a metric."""
    return [value["value"] for value in found["values"] if value["metric"] == metric]


# what each measured at a Swin with experts in two stages, of 12 × 12 and of 6 × 6 tokens
MEASURED = {
    "calibrate": lambda found: (
        found["facts"]["test_images"] == 359 and numbers(found, "temperature")[0] > 0
    ),
    "robustness": lambda found: (
        {value.get("at", {}).get("layer", 1) for value in found["values"]} == {1, 2}
    ),
    "routing": lambda found: len(found["facts"]["load"]) == 2,
    "invariance": lambda found: all(
        0 < one <= 1 for one in numbers(found, "agreement_transformed")
    ),
    "corruptions": lambda found: len(numbers(found, "error")) == 2 + 2 + 1,
    "stability": lambda found: (
        len(numbers(found, "noise_selection_change")) == len(numbers(found, "noise_score")) > 1
    ),
    "few_shot": lambda found: 0 < min(numbers(found, "few_shot")) <= 1,
    "lipschitz": lambda found: numbers(found, "lemma1_violations") == [0],
    "cost": lambda found: numbers(found, "routing_gflops") < numbers(found, "gflops"),
    "explorer": lambda found: len(found["facts"]["layers"]) == 2,
}


@pytest.mark.parametrize("what", MEASURED)
def test_every_measurement_runs_on_swin(on_swin, what):
    assert MEASURED[what](measured(on_swin, f"{what}/finetune", "vmoe"))
