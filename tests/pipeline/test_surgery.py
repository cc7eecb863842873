"""A mixture out of a dense model, then fewer experts: a small study through DVC."""

import json
import re

import pytest

from moecore.pipeline.dvc import stage_definitions, study_dvc_yaml_texts
from moecore.study.document import parse_yaml_document
from tests.project import Project

STAGES = "prepare teacher teacher_router pretrain prune merge calibrate routing measure compare"
TRAINING = "{epochs: 2, batch: 64, learning_rate: 0.003, warmup_epochs: 0.2, precision: float32}"
PARAMS = f"""\
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
    """The study, of which nothing has run."""
    project = Project(tmp_path_factory.mktemp("surgery"), PARAMS).with_dvc()
    definitions = stage_definitions(STAGES.split())
    texts = study_dvc_yaml_texts(definitions, parse_yaml_document(PARAMS).data["run"])
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
    study.write(PARAMS)
    assert done.returncode == 1
    assert re.search(f"^params.yaml:.*{message}", done.stderr, re.MULTILINE), done.stderr


def test_reduced_models_are_measured_as_any(study):
    done = study.moecore("run", "--jobs", "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def measured(name):
        path = study.folder / f"artifacts/measured/{name}/pieces/0.json"
        return json.loads(path.read_text("utf-8"))

    curve = measured("fewer_experts/pretrain")
    scores = {
        (value["at"]["way"], round(8 * value["at"]["left"])): value["value"]
        for value in curve["values"]
        if value["metric"] == "reduced_score" and "way" in value["at"]
    }
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
    assert all(
        words in page for words in ("Pruned", "Merged", "Fewer experts", "Experts removed, %")
    )
