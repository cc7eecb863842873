"""The papers' training details by stages; a mixture out of a dense model, then fewer experts."""

import json
import re

import pytest

from moecore.measure.base import read_result
from moecore.pipeline.dvc_yaml import build_stage_entries, study_dvc_yaml_texts
from moecore.study.yaml_document import parse_yaml_document
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
    text = text.replace("methods: [dense, vmoe, tgr]", f"methods: [{', '.join(NAMES)}]")
    text = text.replace("shots: 20}", "shots: 20, k: 1, guided: true}")
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
    return read_result(project.folder / f"artifacts/measured/{stage}/{name}/0.json", Outcome, stage)


@pytest.mark.parametrize("name", NAMES)
def test_both_trainings_report_what_they_reached(project, name):
    for stage in ("pretrain", "finetune"):
        assert 0 <= trained(project, stage, name).test_score.value <= 1
    if name != "distilled":
        moved = trained(project, "pretrain", name)
        assert len(moved.agreement_with_final) == 2 and moved.agreement_with_final[-1] == 1.0
        assert len(moved.agreement_consecutive) == 1


def test_joint_and_own_teachers_are_kept_beside_the_model_and_agree_where_they_decide(project):
    drawn = project.folder / "artifacts/teacher_router/joint/0/routers.safetensors"
    learned = project.folder / "artifacts/pretrain/joint/0/guide/routers.safetensors"
    assert drawn.read_bytes() != learned.read_bytes()
    (agreement,) = numbers(measured(project, "routing/pretrain", "joint"), "teacher_agreement")
    assert 0 <= agreement <= 1
    settings = json.loads((project.folder / "artifacts/pretrain/oracle/0/model.json").read_text())
    teacher = project.folder / "artifacts/pretrain/oracle/0/guide/teacher/model.safetensors"
    assert settings["guided"] and teacher.exists()
    routing = measured(project, "routing/pretrain", "oracle")
    assert numbers(routing, "teacher_agreement") == [1]
    assert numbers(routing, "tail_of_probs")[0] < 0.5, "the two best of its own four"


def test_fine_tuning_uses_the_other_k_and_upcycling_starts_from_the_teacher(project):
    card = (project.folder / "artifacts/finetune/upcycled/0/model.json").read_text()
    assert json.loads(card)["moe"]["router"]["k"] == 1
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
    first = ("teacher_router", "pretrain")
    trained = [(stage, name, "0") for name in ("vmoe", "dense") for stage in first]
    trained += [("finetune", *item), ("finetune", "finetune", "dense", "0")]
    after = [("calibrate", *item), ("robustness", *item), ("transfer", "finetune", "0")]
    asked = [("measure", name, *item) for name in ("routing", *ON_IMAGES)]
    for words in (*trained, *after, *asked):
        made.stage(*words)
    return made


def numbers(found: dict, metric: str) -> list[float]:
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


STAGES = "prepare teacher teacher_router pretrain prune merge calibrate routing measure compare"
TRAINING = "{epochs: 2, batch: 64, learning_rate: 0.003, warmup_epochs: 0.2, precision: float32}"
SURGERY = f"""\
run:
  methods: [pieces]
  seeds: [0]
  phases: [pretrain, prune, merge]
  measurements: [fewer_experts]
  thorough: [pretrain]
data:
  pretrain: &digits {{kind: digits, size: 16}}
  prune: *digits
  merge: *digits
model: &model {{kind: vit, patch: 8, width: 16, depth: 2, heads: 2, mlp_ratio: 1}}
methods:
  pieces:
    router: {{kind: noisy_top_k, k: 2, noise_std: 0, renormalise: straight}}
    experts: {{kind: mlp, number: 8, hidden_ratio: 0.5}}
    blocks: [1]
    regularizers: [{{kind: importance, weight: 0.005}}]
    upcycle: {{kind: granular, pieces: 2}}
teacher: {{kind: dense, model: *model, training: {TRAINING}}}
teacher_router: {{steps: 1, batch: 1}}
pretrain: {TRAINING}
prune: {{left: 0.5, images: 100}}
merge: {{left: 0.5, images: 100}}
calibrate: {{calibrator: {{kind: temperature}}}}
routing: {{images: 16, augmentations: [], sweeps: {{k: [1], images: 8}}, overlays: 0}}
fewer_experts: {{left: [0.5, 0.125], calibration: 100}}
claims: []
questions:
  - {{metric: accuracy_merge_50, against_metric: accuracy_reap_50, method: pieces, against: pieces,
    better: higher, asks: "is merging better?"}}
  - {{metric: own_expert, against_metric: own_expert_random, method: pieces, against: pieces,
    better: higher, asks: "do experts know their tissue?"}}  # digits have none
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Project:
    project = Project(tmp_path_factory.mktemp("surgery"), SURGERY).with_dvc()
    definitions = build_stage_entries(STAGES.split())
    texts = study_dvc_yaml_texts(definitions, parse_yaml_document(SURGERY).data["run"])
    (project.folder / "dvc.yaml").write_text(texts["dvc.yaml"], encoding="utf-8")
    return project


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prune: {left: 0.5", "prune: {left: 0.1", "22:9: prune.left: found 0.1.*leave 2 .*to 7"),
        ("merge: {left: 0.5", "merge: {left: 0.9", "23:9: merge.left: found 0.9.*leave 2 .*to 7"),
        ("merge: *digits", "merge: {kind: digits}", "10:3: data.merge: found.*allowed: the same"),
        (
            "kind: granular, pieces: 2",
            "kind: drop, ratio: 2",
            "18:27: methods.pieces.upcycle.ratio",
        ),
        ("pieces: 2}", "pieces: 3}", "14:33: methods.pieces.router.k: found 2; .*multiples"),
        ("noise_std: 0,", "", "14:5: methods.pieces.router.noise_std: found 1.*: 0"),
        (
            "noise_std: 0,",
            "noise_std: 0, residual: true,",
            "14:53: methods.pieces.router.residual: found true.*or merge.fold: false .merge.",
        ),
        ("kind: mlp", "kind: eigen", "15:15: methods.pieces.experts.kind: found eigen.*: mlp"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(study, old, new, message):
    study.edit(old, new)
    done = study.moecore("check")
    study.write(SURGERY)
    assert done.returncode == 1
    assert re.search(f"^params.yaml:.*{message}", done.stderr, re.MULTILINE), done.stderr


def test_reduced_models_are_measured_as_any(study):
    done = study.moecore("run", "--jobs", "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def measured(name):
        path = study.folder / f"artifacts/measured/{name}/pieces/0.json"
        return json.loads(path.read_text("utf-8"))

    curve = measured("fewer_experts/pretrain")
    rows = [row for row in curve["values"] if row["metric"] == "reduced_score"]
    rows = [row for row in rows if "way" in row["at"]]
    scores = {(row["at"]["way"], round(8 * row["at"]["left"])): row["value"] for row in rows}
    told = [text.partition(": ")[0] for text in curve["skipped"]]
    assert told == ["reap 0.125, load 0.125", "merge 0.125"]
    trained = measured("pretrain")
    assert scores["all", 8] == trained["test_score"]["value"] > 0.5
    for phase, way in (("prune", "reap"), ("merge", "merge")):
        reduced = measured(phase)
        assert reduced["test_score"]["value"] == pytest.approx(scores[way, 4])
        assert reduced["parameters"] < trained["parameters"] and reduced["epochs"] == 0
        assert len(measured(f"routing/{phase}")["facts"]["load"][0]) == 4
    compared = json.loads((study.folder / "artifacts/compare.json").read_text("utf-8"))
    rows = compared["pieces"]
    assert {"accuracy_reap_50", "accuracy_load_50", "accuracy_merge_50"} <= set(rows["pretrain"])
    assert "not answered: own_expert of pieces" in done.stdout + done.stderr
    assert len(compared["questions"]) == 1, "the other question is answered"
    for phase in ("prune", "merge"):
        assert {"test_accuracy", "ece_after", "load_cv2"} <= set(rows[phase])
    page = (study.folder / "reports/index.html").read_text("utf-8")
    assert all(text in page for text in ("Pruned", "Merged", "Fewer experts", "Experts removed, %"))
