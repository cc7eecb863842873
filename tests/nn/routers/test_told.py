"""The router `told`: by the truth, which models do not see and attacks do not change."""

import pytest
import torch

from moecore.attacks.apgd import Apgd
from moecore.attacks.attack_setup import Target
from moecore.attacks.base import image_generators
from moecore.attacks.pgd import Pgd
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.backbones.base_model import majority_token_kinds
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.swin_v2 import SwinV2
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.predict import text_perplexity
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.told import Told
from tests.measure.test_truth import IMAGE
from tests.nn.backbones.test_language_model import stream, text

MOE = MoESettings(router=Told(), experts=Mlp(number=3), blocks="all")
VIT = Vit(patch=4, width=16, depth=2, heads=2)


def pictures(kinds: list[list[int]]) -> torch.Tensor:
    """Noise, and the four kinds of each image's patches in the last channel."""
    truth = torch.tensor(kinds).view(-1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    noise = torch.rand(len(kinds), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return torch.cat([noise, truth / 255], dim=1)


def test_kinds_go_to_their_experts_in_a_circle_and_what_is_not_known_to_the_first():
    router = Told().build(8, 2)
    _, record = router(torch.randn(1, 5, 8), RoutingContext(truth=torch.tensor([[0, 1, 2, 3, 4]])))
    assert record.chosen.int().argmax(-1).tolist() == [[0, 0, 1, 0, 1]]
    assert torch.equal(record.combine, record.chosen.float())
    assert Told().active(8) == 1
    families = Told(together=2).build(8, 2)
    _, record = families(torch.randn(1, 6, 8), RoutingContext(truth=torch.arange(6)[None]))
    assert record.chosen.int().argmax(-1).tolist() == [[0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    "model", [VIT, SwinV2(patch=4, width=16, depths=(2,), heads=(2,), window=2)]
)
def test_a_model_routes_by_the_last_channel_and_does_not_see_it(model):
    kinds = [[1, 2, 3, 1], [3, 3, 2, 2]]
    made = model.build(IMAGE, MOE).eval()
    for record, layout in zip(made(pictures(kinds)).routing, made.layouts, strict=True):
        chosen = record.chosen.int().argmax(-1)[:, layout.special :]
        assert chosen.tolist() == [[kind - 1 for kind in one] for one in kinds]
    torch.manual_seed(0)
    blind = model.build(IMAGE, MOE.model_copy(update={"router": NoisyTopK()})).eval()
    first, second = (blind(pictures([one, one])).prediction for one in kinds)
    assert torch.equal(first, second)


def test_every_kind_is_read_back():
    kinds = torch.arange(256).view(64, 4)
    layout = VIT.build(IMAGE, MOE).layout
    read = majority_token_kinds(pictures(kinds.tolist()), layout)
    assert torch.equal(read[:, layout.special :], kinds) and not read[:, : layout.special].any()
    moved = pictures(kinds.tolist()).roll(1, dims=3)  # a column of each patch is its neighbour's
    assert torch.equal(majority_token_kinds(moved, layout), read)


@torch.no_grad()
def test_a_text_is_routed_by_the_kinds_after_its_words():
    spec = text(4, 3).model_copy(update={"truth": 3})
    settings = LanguageModel(width=8, depth=3, heads=2, span=4, dropout=0.0)
    made = settings.build(spec, MOE).eval()
    rows = torch.stack([stream(40), torch.randint(4, (40,))])
    states = made.initial_states(1, rows.device)
    (final, records, _), _ = made.read(rows[:1], states, kinds=rows[1:])
    expected = (rows[1] - 1).clamp_min(0)
    assert all(torch.equal(one.chosen.int().argmax(-1)[0], expected) for one in records)

    windows = torch.stack([rows[:, start : start + 16].reshape(8, 4) for start in range(0, 24, 4)])
    torch.testing.assert_close(made.encode(windows).tokens.flatten(0, 1), final[0, 12:36])

    nats = spec.task.token_loss(made.predict(final[:, :-1]), rows[:1, 1:])
    assert text_perplexity(made, rows, 1, False) == pytest.approx(float(nats.mean().exp()))

    made.train().remember(1)
    steps = [made(rows[None, :, start : start + 4]).prediction for start in range(0, 40, 4)]
    torch.testing.assert_close(torch.cat(steps, dim=1), made.predict(final))

    blind = settings.build(spec, MOE.model_copy(update={"router": NoisyTopK()})).eval()
    other = torch.cat([windows[:, :4], windows[:, 4:].flip(0)], dim=1)
    assert torch.equal(blind(windows).prediction, blind(other).prediction)


def test_without_truth_it_is_refused():
    with pytest.raises(UserError, match="router.kind: found told.*allowed: data whose card has"):
        VIT.build(IMAGE.model_copy(update={"truth": 0}), MOE)
    model = LanguageModel(width=8, depth=3, heads=2, span=4)
    with pytest.raises(UserError, match="found told, which reads truth; this text has none"):
        model.build(text(4, 3), MOE)


@pytest.mark.parametrize(
    "attack", [Pgd(steps=3, form="strong"), Apgd(steps=4), Pgd(steps=2, inside=True)]
)
def test_attacks_leave_the_truth(attack):
    images = pictures([[1, 2, 3, 1], [3, 3, 2, 2]])
    model = VIT.build(IMAGE, MOE).eval()
    drawn = image_generators(0, range(2))
    attacked = attack(model, IMAGE.task, images, torch.tensor([0, 1]), 8 / 255, drawn)
    assert torch.equal(attacked[:, 1], images[:, 1])
    assert not torch.equal(attacked[:, 0], images[:, 0])

    target = Target(model, IMAGE.task, images, torch.tensor([0, 1]), 2, precision="bfloat16")
    assert torch.equal(target.attacked(attack, 8 / 255)[:, 1], images[:, 1])
