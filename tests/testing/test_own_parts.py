"""Our own parts keep the promises that moecore.testing checks of anybody's."""

import pytest

from moecore.attacks.apgd import Apgd
from moecore.attacks.base import Attack
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.core.part_families import list_classes, list_own_names
from moecore.face import experts, regularizers, routers
from moecore.measure.base import own_measurements
from moecore.testing import (
    check_attack,
    check_experts,
    check_measurement,
    check_regularizer,
    check_router,
)

CAPACITY = {"capacity_factor": 0.5, "batch_priority": True}
ORDERED = {"k": 1, "capacity_factor": 0.5, "group_size": 1}  # causal: seats in the words' order
EIGEN = experts.Eigen(number=4)
ROUTERS = [
    *(routers.NoisyTopK(k=k) for k in (1, 2)),
    routers.NoisyTopK(renormalise=True),
    routers.NoisyTopK(renormalise="straight", task_gradient=False),
    routers.NoisyTopK(**CAPACITY, group_size=2),
    routers.NoisyTopK(eval_capacity_factor=0.5, group_size=2),
    routers.NoisyTopK(**ORDERED),
    routers.NoisyTopK(k=1, eval_capacity_factor=0.5, group_size=1),
    *(routers.TopKSoftmax(k=k, noise_std=1.0) for k in (1, 2)),
    routers.ExpertChoice(),
    routers.ExpertChoice(k=1, capacity_factor=0.5, group_size=2),
    routers.SoftSlots(slots=3),
    routers.Hash(k=2),
    routers.Hash(k=2, by="position"),
    routers.FrozenCopy(),
    routers.FrozenCopy(router=routers.NoisyTopK(**ORDERED)),
    routers.Told(),
    *(routers.TeacherRouted(inference=who) for who in ("teacher", "student")),
    *(
        routers.Eigenbasis(context=context, selection=selection)
        for context in ("tokens", "attention_output", "learned")
        for selection in ("prune", "literal")
    ),
]
EXPERTS = [
    *(experts.Mlp(activation=name) for name in ("gelu", "quick_gelu")),
    experts.Mlp(activation="relu", number=3, dropout=0.3),
    *(experts.Eigen(factored_output=factored) for factored in (False, True)),
]
REGULARIZERS = [
    *(part() for part in list_classes(regularizers.Regularizer).values()),
    regularizers.GroupSparsity(reduction="authors", padding="circular"),
]
OBJECTIVES = ("task", "cross_entropy", "dlr", "balance", "routing_change")
ATTACKS = [
    attack.model_copy(update={"objective": objective})
    for attack in (Fgsm(), Pgd(steps=3), Pgd(steps=3, form="strong"), Apgd(steps=5))
    for objective in OBJECTIVES
]
ELSEWHERE = {  # what they measure is not in the small model and data, or it is time
    "cohort_checks",
    "cost",
    "retrieval",
    "truth",
    "word_swaps",
    "zero_shot",
}
MEASUREMENTS = [own for name, own in own_measurements().items() if name not in ELSEWHERE]


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_routers(router):
    check_router(router)


@pytest.mark.parametrize("context", ["tokens", "attention_output", "learned"])
@pytest.mark.parametrize("factored", [False, True])
def test_a_router_that_shares_the_experts_bases(context, factored):
    shared = experts.Eigen(number=4, factored_output=factored)
    check_router(routers.Eigenbasis(context=context), shared)


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
    ],
)
def test_no_part_is_left_out(family, parts):
    assert sorted({part.kind for part in parts}) == list_own_names(family)
