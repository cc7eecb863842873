"""The frozen teacher and its routers."""

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.vit import Vit
from moecore.training.artifacts import load_guide, load_model, save_guide, save_model, save_no_guide
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import Guided, aligned_blocks, build_guide, standing_alone
from moecore.training.loop import fit
from moecore.training.method import Method, TeacherRouter
from moecore.training.settings import TeacherRouterFit
from moecore.training.teachers.fit_router import fit_routers
from tests.training.small import CPU, IMAGE, SETTINGS, task

TGR = Method(
    router={"kind": "noisy_top_k", "k": 2},
    experts={"kind": "mlp", "number": 4},
    regularizers=[{"kind": "router_kl"}],
)


JOINT = TGR.model_copy(
    update={"teacher_router": TeacherRouter(fit="joint", load=0.1, entropy=0.01)}
)
ORACLE = Method(
    router={"kind": "teacher_routed", "k": 2},
    experts={"kind": "mlp", "number": 4},
    regularizers=[{"kind": "router_kl"}],
    teacher_router={"fit": "joint"},
)


def guide(depth: int = 4, method: Method = TGR):
    torch.manual_seed(0)
    return build_guide(Vit(patch=4, width=32, depth=depth, heads=2).build(IMAGE), method, 4)


def test_blocks_are_aligned_by_relative_depth():
    # the paper's layers 8, 10, 12 of 12 are 7, 9, 11 from 0; of a teacher with 24 blocks they are
    # its 16th, 20th and 24th
    assert aligned_blocks((7, 9, 11), 12, 12) == (7, 9, 11)
    assert aligned_blocks((7, 9, 11), 12, 24) == (15, 19, 23)


def test_fitting_makes_it_confident_and_balanced_and_leaves_the_teacher_alone():
    made = guide()
    before = {name: value.clone() for name, value in made.teacher.state_dict().items()}
    steps = list(
        fit_routers(
            made,
            task().train,
            TeacherRouter(load=1.0, entropy=0.1),
            TeacherRouterFit(steps=60, batch=16, learning_rate=0.05),
            seed=0,
        )
    )
    assert (
        steps[-1][0] == 60
        and steps[-1][1]["entropy"] < steps[0][1]["entropy"]
        and steps[-1][1]["balance"] < 0.2
    )
    assert all(
        torch.equal(value, before[name]) for name, value in made.teacher.state_dict().items()
    )


def test_a_guided_student_comes_nearer_to_its_guide():
    made = task(TGR, guide=guide().requires_grad_(False))
    found = [
        metrics.values["router_kl"]
        for metrics in fit(made, SETTINGS.model_copy(update={"epochs": 6}), 0, CPU)
    ]
    assert found[-1] < found[0]


def test_saved_and_loaded_it_says_the_same_also_at_another_resolution(tmp_path):
    made, images = guide(depth=8), torch.rand(2, 1, 8, 8)
    save_guide(tmp_path, made)
    loaded = load_guide(tmp_path)
    assert made.blocks == (3, 7) == loaded.blocks
    for ours, theirs in zip(loaded(images).probs, made(images).probs, strict=True):
        assert torch.equal(ours, theirs)
    larger = load_guide(tmp_path, size=16)(torch.rand(2, 1, 16, 16))
    assert larger.probs[0].shape == (2, 17, 4) and larger.prediction.shape == (2, 2)


def test_a_method_without_teacher_has_no_guide(tmp_path):
    save_no_guide(tmp_path)
    assert load_guide(tmp_path) is None


def test_fitted_routers_stay_and_joint_ones_learn_while_the_teacher_never_does():
    for method, learns in ((TGR, False), (JOINT, True)):
        made = task(method, guide=guide(method=method))
        before = {name: value.clone() for name, value in made.guide.state_dict().items()}
        terms = [metrics.values for metrics in fit(made, SETTINGS, 0, CPU)]
        moved = {
            name
            for name, value in made.guide.state_dict().items()
            if not torch.equal(value, before[name])
        }
        assert moved == ({"routers.0", "routers.1"} if learns else set())
        assert ("teacher_router" in terms[0]) == learns


def test_joint_training_stopped_and_resumed_ends_bit_equal_in_student_and_teacher_router(tmp_path):
    whole = task(JOINT, guide=guide(method=JOINT))
    list(fit(whole, SETTINGS, 0, CPU))
    run = fit(task(JOINT, guide=guide(method=JOINT)), SETTINGS, 0, CPU, Checkpoint(tmp_path))
    for _ in range(2):
        next(run)
    run.close()
    resumed = task(JOINT, seed=9, guide=guide(method=JOINT))
    list(fit(resumed, SETTINGS, 0, CPU, Checkpoint(tmp_path)))
    for ours, theirs in zip(
        resumed.learners.parameters(), whole.learners.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_student_routed_by_its_teacher_carries_it_along(tmp_path):
    made = task(ORACLE, guide=guide(method=ORACLE))
    with pytest.raises(UserError, match="teacher"):
        made.model(torch.rand(2, 1, 8, 8))
    before = made.guide.routers[0].detach().clone()
    list(fit(made, SETTINGS, 0, CPU))
    assert not torch.equal(
        made.guide.routers[0], before
    )  # the task and the balance reach the teacher's router
    alone, images = standing_alone(made.model, made.guide).eval(), torch.rand(3, 1, 8, 8)
    assert isinstance(alone, Guided)
    save_model(tmp_path, alone)
    loaded, expected = load_model(tmp_path)(images), alone(images)
    assert torch.equal(loaded.prediction, expected.prediction)
    teacher = made.guide(images).probs
    for record, probs in zip(expected.routing, teacher, strict=True):
        assert torch.equal(
            record.chosen,
            torch.zeros_like(record.chosen).scatter(-1, probs.topk(2, dim=-1).indices, True),
        )


def test_without_a_teacher_such_a_student_is_refused():
    with pytest.raises(UserError, match="teacher_routed asks a teacher"):
        standing_alone(task(ORACLE).model, None)
