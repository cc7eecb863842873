"""Experts of the words of captions in each MoE layer of a text tower. n captions, M tokens each."""

import torch
from torch import Tensor

from moecore.data.text.tokenizers import Tokenizer
from moecore.nn.backbones.base_model import Model
from moecore.nn.backbones.two_towers import TEXTS, TwoTowerModel
from moecore.nn.predict import eval_mode
from moecore.training.guide import GuidedModel

Read = list[tuple[str, list[int]]]  # words with their experts, largest weight first


def find_two_towers(model: Model) -> TwoTowerModel | None:
    """Return the two-tower model, without its guide; None for other models."""
    student = model.model if isinstance(model, GuidedModel) else model
    if isinstance(student, TwoTowerModel):
        return student
    return None


@torch.no_grad()
def experts_by_word(
    model: TwoTowerModel, tokens: Tensor, tokenizer: Tokenizer, max_experts: int = 2
) -> list[list[Read]]:
    """Return the words with their experts per caption (n, M) and MoE layer; [] without layers."""
    captions_read: list[list[Read]] = []
    with eval_mode(model):
        for part in tokens.split(TEXTS):
            _, records = model.text(part.to(model.logit_scale.device))
            masks = model.text.caption_mask(part)
            layers = [experts_by_weight(record.combine[0].cpu(), max_experts) for record in records]
            first = 0
            for row, mask in zip(part, masks, strict=True):
                caption = [tokenizer.word(token) for token in row[mask].tolist()]
                last = first + len(caption)
                captions_read.append(
                    [list(zip(caption, layer[first:last], strict=True)) for layer in layers]
                )
                first = last
    return captions_read


def experts_by_weight(combine: Tensor, max_experts: int) -> list[list[int]]:
    """Return the experts with nonzero weight per row of weights (n, E), largest first."""
    weights, order = combine.topk(min(max_experts, combine.shape[-1]))
    return [
        [expert for expert, weight in zip(*row, strict=True) if weight > 0]
        for row in zip(order.tolist(), weights.tolist(), strict=True)
    ]
