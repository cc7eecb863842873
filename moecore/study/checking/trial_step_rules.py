"""A small step of every method: forward, losses and backward, before anything trains.

A UserError is no fault: it refuses so small a model. Those of full size are built elsewhere.
"""

from collections.abc import Collection, Sequence
from functools import partial

from moecore.nn.layers.moe import MoESettings
from moecore.study.study import Misfits, Study
from moecore.study.trial_rules import run_and_list_faults
from moecore.testing.check_helpers import small_objective_inputs, small_vit
from moecore.training.job import Objective
from moecore.training.regularizers.base import Regularizer


def trial_step_misfits(study: Study, faulty: Collection[tuple] = ()) -> Misfits:
    """Yield what is wrong with a step of each method of ``run.methods``.

    faulty: the keys of parts whose fault is known; their methods are not tried.
    """
    for name in study.run.methods:
        method = study.methods[name]
        towers = (((), method, method.losses), (("text",), method.text, method.text_losses))
        for place, tower, losses in towers:
            keys = ("methods", name, *place)
            is_known = any(known[: len(keys)] == keys for known in faulty)
            if tower is None or tower.router is None or tower.experts is None or is_known:
                continue
            moe = MoESettings(router=tower.router, experts=tower.experts, blocks="all")
            for fault in run_and_list_faults(partial(_step, moe, losses), []):
                yield keys, f"a small step fails: {fault}"


def _step(moe: MoESettings, losses: Sequence[Regularizer]) -> None:
    """Raise AssertionError, in a line, where a step of a small ViT with these layers is wrong."""
    model = small_vit(moe=moe)
    step = small_objective_inputs(model)
    objective = Objective(losses)
    terms = objective.terms(step)
    for name, term in terms.items():
        assert term.ndim == 0 and term.isfinite(), f"the loss {name} is no finite scalar"
    objective.total(terms).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
