"""Which experts read which words of captions, in each MoE layer of a text tower.

n captions, M tokens of one.
"""

import torch
from torch import Tensor

from moecore.data.text.tokenizers import Tokenizer
from moecore.nn.backbones.base_model import Model
from moecore.nn.backbones.two_towers import TEXTS, TwoTowerModel
from moecore.nn.predict import eval_mode
from moecore.training.guide import GuidedModel

Read = list[tuple[str, list[int]]]  # words with their experts, that with most weight first


def find_two_towers(model: Model) -> TwoTowerModel | None:
    """The two towers of a model; None where it has none."""
    student = model.model if isinstance(model, GuidedModel) else model
    if isinstance(student, TwoTowerModel):
        return student
    return None


@torch.no_grad()
def experts_by_word(
    model: TwoTowerModel, tokens: Tensor, tokenizer: Tokenizer, most: int = 2
) -> list[list[Read]]:
    """Return for each of the captions (n, M) and each layer its words, first to last, with the
    ``most`` experts that read them; [] if none are sparse.
    """
    captions_read: list[list[Read]] = []
    with eval_mode(model):
        for part in tokens.split(TEXTS):
            _, records = model.text(part.to(model.logit_scale.device))
            there = model.text.caption_mask(part)
            layers = [experts_by_weight(record.combine[0].cpu(), most) for record in records]
            first = 0
            for row, mask in zip(part, there, strict=True):
                words = [tokenizer.word(token) for token in row[mask].tolist()]
                last = first + len(words)
                captions_read.append(
                    [list(zip(words, layer[first:last], strict=True)) for layer in layers]
                )
                first = last
    return captions_read


def experts_by_weight(combine: Tensor, most: int) -> list[list[int]]:
    """Return for each row of weights (n, E) the experts whose weight is not 0, largest first."""
    weights, order = combine.topk(min(most, combine.shape[-1]))
    return [
        [expert for expert, weight in zip(*row, strict=True) if weight > 0]
        for row in zip(order.tolist(), weights.tolist(), strict=True)
    ]
