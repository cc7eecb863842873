import pytest
from pydantic import ValidationError

from moecore.training.method import Method
from tests.training.small import VMOE

TGR = VMOE.model_copy(
    update={
        "regularizers": Method(
            regularizers=[{"kind": "router_kl"}, {"kind": "z_loss"}]
        ).regularizers
    }
)


def test_dense_is_the_method_without_router():
    assert Method().moe is None and not Method().guided and Method().provided == frozenset()


def test_router_and_experts_come_together():
    with pytest.raises(ValidationError, match="both `router` and `experts`"):
        Method(router={"kind": "noisy_top_k"})


def test_what_it_provides_and_whether_it_is_guided():
    assert VMOE.provided == {"load", "routing"} and not VMOE.guided and TGR.guided


def test_fine_tuning_drops_the_teachers_losses_and_changes_k():
    tuned = TGR.for_finetuning(k=1, guided=False)
    assert [loss.kind for loss in tuned.regularizers] == ["z_loss"] and tuned.router.k == 1
    assert TGR.for_finetuning(k=None, guided=True) == TGR
    assert Method().for_finetuning(k=1, guided=False) == Method()
