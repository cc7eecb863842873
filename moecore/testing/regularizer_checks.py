"""What every regularizer promises, as a function that a test calls in one line."""

from typing import Any

import torch

from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs
from moecore.nn.experts.base import ZeroComputation
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.dynamic import Dynamic
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.relu import Relu
from moecore.testing.check_helpers import (
    EXPERTS,
    IMAGE,
    assert_that,
    settings_of,
    small_objective_inputs,
    small_vit,
)
from moecore.training.regularizers.base import Regularizer

OWN = {  # routers and experts that alone provide what a regularizer needs
    need: MoESettings(router=router, experts=experts, blocks="all")
    for need, router, experts in (
        ("sparsity", Relu(), Mlp(number=EXPERTS)),
        ("embeddings", Dynamic(), Mlp(number=EXPERTS)),
        ("zero_computation", NoisyTopK(), Mlp(number=EXPERTS, zero_computation=ZeroComputation())),
    )
}
SAID = IMAGE.model_copy(update={"truth": EXPERTS})  # with a channel that says the truth
NEEDS = frozenset(
    {"routing", "load", "basis", "orthonormal", "guidance", "truth", "two_views", *OWN}
)


def check_regularizer(regularizer: Regularizer | type[Regularizer]) -> None:
    """Raise AssertionError, in one line, where a regularizer breaks a promise of regularizers.

    regularizer: settings, or their class, whose defaults are then checked. It gives a finite fp32
    scalar, unweighted, as the objective weighs it; the same twice, drawing nothing and changing
    nothing; a gradient reaches the model or the teacher's routing. ``needs`` has known words only,
    and without what it needs it is a UserError in one line.
    """
    settings = settings_of(regularizer)
    model = small_vit(SAID, moe=next((OWN[need] for need in settings.needs & set(OWN)), None))
    step = small_objective_inputs(model)
    unknown = sorted(settings.needs - NEEDS)
    assert_that(settings, not unknown, f"needs has words among {', '.join(sorted(NEEDS))}")
    before = torch.get_rng_state()
    term = settings(step)
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "it draws no number")
    scalar = term.ndim == 0 and term.dtype == torch.float32 and bool(term.isfinite())
    assert_that(settings, scalar, "it gives a finite fp32 scalar")
    assert_that(settings, torch.equal(term, settings(step)), "it gives the same twice")
    heavier = settings.model_copy(update={"weight": 3 * settings.weight + 1})
    promise = "its term is not multiplied by weight: the objective does that"
    assert_that(settings, torch.equal(term, heavier(step)), promise)
    assert step.guidance is not None
    leaves = [*model.parameters(), *step.guidance.probs]
    gradients = torch.autograd.grad(term, leaves, materialize_grads=True)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    assert_that(settings, finite, "its gradients are finite")
    reached = any(gradient.any() for gradient in gradients)
    assert_that(settings, reached, "a gradient reaches the model or the teacher's routing")
    _check_refusals(settings, step)


def _check_refusals(regularizer: Any, step: ObjectiveInputs) -> None:
    dense = step._replace(output=step.output._replace(routing=()), model=torch.nn.Linear(1, 1))
    without = {
        "routing": dense,
        "guidance": step._replace(guidance=None),
        "truth": step._replace(model=small_vit()),
        "two_views": step._replace(batch=step.batch._replace(views=1)),
    }
    for need, lacking in without.items():
        if need not in regularizer.needs:
            continue
        try:
            regularizer(lacking)
        except UserError as error:
            assert_that(regularizer, "\n" not in str(error), f"without {need} it raises one line")
        else:
            assert_that(regularizer, False, f"without {need} it raises a UserError")
