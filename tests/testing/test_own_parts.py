"""Our own parts keep the promises that moecore.testing checks of anybody's."""

import pytest

from moecore import backbones, experts, regularizers, routers
from moecore.attacks.apgd import Apgd
from moecore.attacks.base import Attack
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.core.config import list_own_names, part_classes_by_kind
from moecore.data.card import parse_card_task
from moecore.measure.base import builtin_measurements
from moecore.measure.calibrators.base import Calibrator
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.two_towers import TextTowerSettings
from moecore.nn.balances.base import Balance
from moecore.testing import (
    check_attack,
    check_backbone,
    check_balance,
    check_calibrator,
    check_experts,
    check_measurement,
    check_regularizer,
    check_router,
    check_teacher,
)
from moecore.testing.check_helpers import IMAGE
from moecore.training.settings import Training
from moecore.training.teachers.dense import Dense

CAPACITY = {"capacity_factor": 0.5, "batch_priority": True}
BIAS = {"kind": "loss_free", "rate": 0.1}
ORDERED = {"k": 1, "capacity_factor": 0.5, "group_size": 1}  # causal: seats in the words' order
EIGEN = experts.Eigen(number=4)
ROUTERS = [
    *(routers.NoisyTopK(k=k) for k in (1, 2)),
    routers.NoisyTopK(renormalise=True),
    routers.NoisyTopK(renormalise="straight", task_gradient=False),
    routers.NoisyTopK(**CAPACITY, group_size=2),
    routers.NoisyTopK(eval_capacity_factor=0.5, group_size=2),
    routers.NoisyTopK(**ORDERED),
    routers.NoisyTopK(score="sigmoid", renormalise=True, scale=2.5, balance=BIAS),
    routers.NoisyTopK(score="sqrt_softplus", start="orthonormal", input_jitter=0.1),
    routers.NoisyTopK(balance=BIAS, groups={"number": 2, "kept": 2, "per_group": 1}),
    routers.NoisyTopK(k=1, eval_capacity_factor=0.5, group_size=1),
    *(routers.TopKSoftmax(k=k, noise_std=1.0) for k in (1, 2)),
    routers.TopKSoftmax(balance=BIAS, groups={"number": 2, "kept": 2, "per_group": 1}),
    routers.TopKSoftmax(score="sigmoid", start="orthonormal", **ORDERED),
    routers.Cosine(balance=BIAS, noise_std=1.0),
    routers.NoisyTopK(residual=True, input_jitter=0.1),
    *(routers.TopP(k=k) for k in (3, None)),
    routers.TopP(balance=BIAS),
    routers.Relu(),
    routers.Dynamic(),
    *(
        routers.Competition(
            router_weight=0.01, chosen_weight=0.1, diversity_weight=0.1, balance=balance
        )
        for balance in (None, BIAS, {"kind": "quantile"}, {"kind": "sinkhorn"})
    ),
    *(routers.Merged(normalise=normalise) for normalise in (True, False)),
    *(routers.Depth(share=0.3, sampling=how) for how in (None, "bce", "predictor")),
    routers.Depth(share=0.5, router=routers.NoisyTopK(**CAPACITY, group_size=2)),
    routers.Depth(share=0.5, router=routers.NoisyTopK(score="sigmoid", balance=BIAS)),
    routers.ExpertChoice(),
    routers.ExpertChoice(k=1, capacity_factor=0.5, group_size=2),
    routers.SoftSlots(slots=3),
    routers.Hash(k=2),
    routers.Hash(k=2, by="position"),
    routers.Hash(k=2, by="word"),
    routers.FrozenCopy(),
    *(routers.Folded(router=one) for one in (routers.NoisyTopK(), routers.TopP(), routers.Hash())),
    routers.FrozenCopy(router=routers.NoisyTopK(**ORDERED)),
    routers.Told(),
    *(routers.TeacherRouted(inference=who) for who in ("teacher", "student")),
    *(
        routers.Eigenbasis(context=context, selection=selection)
        for context in ("tokens", "attention_output", "learned")
        for selection in ("prune", "literal")
    ),
]
BALANCES = [part() for part in part_classes_by_kind(Balance).values()]
EXPERTS = [
    *(experts.Mlp(activation=name) for name in ("gelu", "quick_gelu", "linear", "swiglu")),
    experts.Mlp(activation="relu", number=3, dropout=0.3),
    experts.Mlp(fine=2, shared=1, zero_computation={}),
    *(experts.Eigen(factored_output=factored) for factored in (False, True)),
]
REGULARIZERS = [
    *(
        part(weight=0.1) if part.model_fields["weight"].is_required() else part()
        for part in part_classes_by_kind(regularizers.Regularizer).values()
    ),
    regularizers.SwitchBalance(level="sequence", count_from="probs"),
    regularizers.SwitchBalance(level="group", group_size=3),
    regularizers.GroupSparsity(reduction="authors", padding="circular"),
]
OBJECTIVES = ("task", "cross_entropy", "dlr", "balance", "routing_change")
ATTACKS = [
    attack.model_copy(update={"objective": objective})
    for attack in (Fgsm(), Pgd(steps=3), Pgd(steps=3, form="strong"), Apgd(steps=5))
    for objective in OBJECTIVES
]
TEXT = {"channels": 4, "size": (4,), "mean": (0.0,) * 4, "std": (1.0,) * 4}
CAPTIONS = {"words": 9, "context": 4, "captions": 2, "end": 2, "vocabulary": "0" * 64}
STAGED = {"patch": 1, "width": 16, "depths": (2, 2), "heads": (2, 4)}
VOLUME = IMAGE.model_copy(update={"size": (8, 12, 4)})
AGED = VOLUME.model_copy(update={"task": parse_card_task({"kind": "regression", "target": "age"})})
VIT = backbones.Vit(patch=4, width=16, depth=2, heads=2)
CUBES = backbones.Vit3d(patch=4, width=24, depth=2, heads=2)
BACKBONES = [
    *((VIT.model_copy(update={"pooling": name}), IMAGE) for name in ("mean", "class+distillation")),
    *(
        (CUBES.model_copy(update=changes), VOLUME)
        for changes in ({"stem": "pooled", "pool": 2}, {"stem": "conv", "positions": "sinusoidal"})
    ),
    (backbones.Sfcn(channels=(4, 8, 8), head="number"), VOLUME),
    (backbones.Sfcn(channels=(4, 8, 8)), AGED),
    *((kind(**STAGED, window=4), IMAGE) for kind in (backbones.Swin, backbones.SwinV2)),
    (backbones.SwinMoe(**STAGED, window=3), IMAGE),
    (backbones.SingleLayer(hidden=5), IMAGE),
    *(
        (
            backbones.LanguageModel(width=8, depth=2, heads=2, span=4, layers=layers),
            ImageSpec(**TEXT, task=parse_card_task({"kind": "next_token", "words": 11})),
        )
        for layers in ("smoe", "momentum", "adam")
    ),
    (
        backbones.TwoTowers(image=VIT, text=TextTowerSettings(width=16, depth=1, heads=2)),
        IMAGE.model_copy(update={"task": parse_card_task({"kind": "image_text", **CAPTIONS})}),
    ),
]
ELSEWHERE = {  # their subject is not in the small model and data; it is time; they have no defaults
    "cohort_checks",
    "cost",
    "retrieval",
    "robustness",
    "truth",
    "word_swaps",
    "zero_shot",
}
MEASUREMENTS = [own for name, own in builtin_measurements().items() if name not in ELSEWHERE]


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_routers(router):
    check_router(router)


@pytest.mark.parametrize(
    "settings",
    [{}, {"activation": "swiglu"}, {"fine": 2}, {"zero_computation": {"copies": 2}}],
    ids=["gelu", "swiglu", "fine", "zero_computation"],
)
def test_a_router_beside_shared_experts(settings):
    beside = experts.Mlp(number=4, hidden_ratio=1.5, shared=1, **settings)
    check_router(routers.NoisyTopK(), beside)


@pytest.mark.parametrize(
    "router",
    [
        routers.NoisyTopK(score="sigmoid", renormalise=True, balance=BIAS),
        routers.NoisyTopK(**CAPACITY, group_size=2),
        routers.TopKSoftmax(),
        routers.TopP(),
        routers.Relu(),
        routers.Hash(by="position"),
        routers.Eigenbasis(),
        routers.Depth(share=0.5),
    ],
    ids=repr,
)
def test_a_router_among_experts_without_a_network(router):
    check_router(router, experts.Mlp(number=3, zero_computation={}))


@pytest.mark.parametrize("context", ["tokens", "attention_output", "learned"])
@pytest.mark.parametrize("factored", [False, True])
def test_a_router_that_shares_the_experts_bases(context, factored):
    shared = experts.Eigen(number=4, factored_output=factored)
    check_router(routers.Eigenbasis(context=context), shared)


@pytest.mark.parametrize("balance", BALANCES, ids=repr)
def test_balances(balance):
    check_balance(balance)


@pytest.mark.parametrize("part", EXPERTS, ids=repr)
def test_experts(part):
    check_experts(part)


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_regularizers(regularizer):
    check_regularizer(regularizer)


@pytest.mark.parametrize(
    "attack", [*ATTACKS, Pgd(steps=3, inside=True)], ids=lambda attack: attack.name
)
def test_attacks(attack):
    check_attack(attack)


@pytest.mark.parametrize(("backbone", "image"), BACKBONES, ids=repr)
def test_backbones(backbone, image):
    check_backbone(backbone, image)


@pytest.mark.parametrize("calibrator", part_classes_by_kind(Calibrator).values())
def test_calibrators(calibrator):
    check_calibrator(calibrator)


def test_a_teacher():
    check_teacher(Dense(model=VIT, training=Training(epochs=1, batch=8, learning_rate=0.1)))


@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_measurements(measurement):
    check_measurement(measurement)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        (routers.Router, ROUTERS),
        (experts.Experts, EXPERTS),
        (regularizers.Regularizer, REGULARIZERS),
        (Attack, ATTACKS),
        (backbones.Backbone, [backbone for backbone, _ in BACKBONES]),
    ],
)
def test_no_part_is_left_out(family, parts):
    assert sorted({part.kind for part in parts}) == list_own_names(family)
