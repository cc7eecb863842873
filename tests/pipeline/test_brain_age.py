"""ermoe/brain_age at a tiny size: every stage of its dvc.yaml, on its own params.yaml."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from moecore.brain import prediction_table as brain_out_of_fold
from moecore.measure.base import Skipped, read_result
from moecore.measure.values import Found
from moecore.pipeline.code_hashes import write_code
from moecore.pipeline.study_runs import write_dvc_files
from moecore.stages import calibrate as calibrate_stage
from moecore.stages import compare, measure, out_of_fold, prepare, pretrain, teacher, teacher_router
from moecore.stages import robustness as robustness_stage
from moecore.training.outcome import Outcome
from tests.project import compose_shipped

RESULTS = {
    "calibrate": Found,
    "robustness": Found,
    "routing": Found,
    "cohort_checks": Found,
    "out_of_fold": brain_out_of_fold.OutOfFoldResult,
}
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
    params["pretrain"] |= {
        "epochs": 2,
        "batch": 4,
        "warmup_epochs": 0,
        "log_every": 1,
        "checkpoint_every": 2,
    }
    for method in params["methods"].values():
        if "regions" in method:
            method["regions"] |= {"after": 0, "warm_start_epochs": 1}
    attacks = [{"kind": "fgsm", "inside": True}, {"kind": "pgd", "inside": True, "steps": 2}]
    sweeps = {"k": [1, 2], "threshold": [0.5], "images": 2}
    params["routing"] |= {
        "images": 3,
        "overlays": 1,
        "augmentation_images": 2,
        "augmentations": ["identity", "affine"],
        "sweeps": sweeps,
    }
    params["robustness"] |= {
        "images": 4,
        "epsilons": [0.05],
        "attacks": attacks,
        "audit": {"images": 2, "steps": 2},
    }
    return yaml.safe_dump(params, sort_keys=False)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """The folder in which all stages ran."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("brain_age")
        patch.chdir(folder)
        patch.setenv("MOECORE_THREADS", "1")
        patch.delenv("MOECORE_PARAMS", raising=False)
        (folder / "params.yaml").write_text(small(), encoding="utf-8")
        write_dvc_files(folder, compose_shipped(STUDY).stages)
        write_code("params.yaml")
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
    """What a stage found, as the type that it writes."""
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
    assert isinstance(measured(study, "out_of_fold", method), Skipped)
    attacked = measured(study, "robustness", method)
    whole = measured(study, "cohort_checks", method).find("whole_mae").value
    assert attacked.find("clean").value == pytest.approx(whole, rel=1e-4), "the same test volumes"
    routed = measured(study, "routing", method)
    if method == "dense":
        assert isinstance(routed, Skipped), "it has no experts"
    else:
        assert len(routed.facts["load"]) == 2
    table = study / f"artifacts/calibrate/pretrain/{method}/0/predictions.csv"
    assert table.stat().st_size > 100


def test_simulated_subjects_are_aged_and_scanned_again(study):
    found = measured(study, "cohort_checks", "ermoe")
    assert found.facts["not_checked"] == {}
    assert all(found.find(f"isolated_{name}") for name in ("wm", "gm", "csf"))
    assert np.shape(found.facts["ageing"]["predictions"]) == (2, 3)
    assert found.find("rescan").value > 0


def test_region_experts_are_tried_where_they_were_not_taught(study):
    found = measured(study, "cohort_checks", "ermoe")
    assert len(found.all("mixture_agreement")) == 6 * 3, "pairs of tissues, shares of the second"
    assert found.find("whole_people").value == found.find("other_generator_people").value == 2
    dense = measured(study, "cohort_checks", "dense")
    assert dense.find("whole_agreement") is None
    assert "no region experts" in dense.facts["not_checked"]["generalisation"]


def test_the_report_has_every_method(study):
    page = (study / "reports/index.html").read_text(encoding="utf-8")
    assert all(method in page for method in METHODS) and "imulated" in page
