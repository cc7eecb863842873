"""The frozen teacher and its routers."""

import torch

from moecore.backbones.vit import Vit
from moecore.teachers.fit_router import fit_routers
from moecore.teachers.guide import aligned_blocks, build_guide, load_guide, save_guide, save_no_guide, teacher_router_loss
from moecore.training.loop import fit
from moecore.training.method import Method, TeacherRouter
from moecore.training.settings import TeacherRouterFit
from tests.training.small import CPU, IMAGE, SETTINGS, task

TGR = Method(router={"kind": "noisy_top_k", "k": 2}, experts={"kind": "mlp", "number": 4}, regularizers=[{"kind": "router_kl"}])


def guide(depth: int = 4):
    torch.manual_seed(0)
    return build_guide(Vit(patch=4, width=32, depth=depth, heads=2).build(IMAGE), TGR, 4)


def test_blocks_are_aligned_by_relative_depth():
    # the paper's layers 8, 10, 12 of 12 are 7, 9, 11 from 0; of a teacher with 24 blocks they are its 16th, 20th and 24th
    assert aligned_blocks((7, 9, 11), 12, 12) == (7, 9, 11)
    assert aligned_blocks((7, 9, 11), 12, 24) == (15, 19, 23)


def test_the_loss_by_hand():
    # one token uniform over 2 experts: balance 0, entropy ln 2; two tokens on different experts: balance 0, entropy 0;
    # both on one expert: importance 2, 0 has mean 1 and variance 1, so balance 1, entropy 0
    uniform, apart, together = torch.full((1, 1, 2), 0.5), torch.eye(2).unsqueeze(0), torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    for probs, load, entropy in ((uniform, 0.0, 0.6931472), (apart, 0.0, 0.0), (together, 1.0, 0.0)):
        terms = teacher_router_loss((probs, probs), TeacherRouter())
        torch.testing.assert_close(terms["load"], torch.tensor(2 * load))
        torch.testing.assert_close(terms["entropy"], torch.tensor(2 * entropy))


def test_fitting_makes_it_confident_and_balanced_and_leaves_the_teacher_alone():
    made = guide()
    before = {name: value.clone() for name, value in made.teacher.state_dict().items()}
    steps = list(fit_routers(made, task().train, TeacherRouter(load=1.0, entropy=0.1), TeacherRouterFit(steps=60, batch=16, learning_rate=0.05)))
    assert steps[-1][0] == 60 and steps[-1][1]["entropy"] < steps[0][1]["entropy"] and steps[-1][1]["load"] < 0.2
    assert all(torch.equal(value, before[name]) for name, value in made.teacher.state_dict().items())


def test_a_guided_student_comes_nearer_to_its_guide():
    made = task(TGR, guide=guide().requires_grad_(False))
    found = [metrics.values["router_kl"] for metrics in fit(made, SETTINGS.model_copy(update={"epochs": 6}), 0, CPU)]
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
