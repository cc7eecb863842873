"""No router of a language model looks ahead: a changed later word, of the same text or of another
in its batch, never moves an earlier logit, in training or in evaluation.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.nn.backbones.language_model import LanguageModel, LanguageTransformer
from moecore.nn.backbones.two_towers import TextTowerSettings, TextTransformer
from moecore.nn.layers.moe import MoESettings
from moecore.study.document import load_yaml_document
from moecore.training.method import Method
from tests.nn.backbones.test_language_model import WORDS, text
from tests.nn.backbones.test_two_towers import TASK

METHODS = {
    name: Method.model_validate(entry)
    for name, entry in load_yaml_document(str(ROOT / "params.yaml")).data["methods"].items()
    if entry
}
EXPERTS = {"kind": "mlp", "number": 4, "hidden_ratio": 1.0}
LIMITED = {"kind": "noisy_top_k", "k": 1, "capacity_factor": 0.5, "group_size": 1}
BLOCK = 12


def moe_of(router: dict, experts: dict = EXPERTS) -> MoESettings:
    return MoESettings.model_validate({"router": router, "experts": experts, "blocks": "all"})


def read_logits(model: LanguageTransformer, words: Tensor) -> Tensor:
    """Logits (B, M, V); the random draws are always the same ones."""
    torch.manual_seed(0)
    return model(words).prediction


def assert_causal(moe: MoESettings, truth: int = 0, modes: tuple = (True, False)) -> None:
    """A word is changed and, where there is a truth, its kind; modes: training, evaluation."""
    torch.manual_seed(0)
    words = torch.randint(WORDS, (2, 1 + bool(truth), BLOCK))
    spec = text(BLOCK, 0).model_copy(update={"truth": truth})
    model = LanguageModel(width=8, depth=2, heads=2, span=4).build(spec, moe).double()
    for training in modes:
        model.train(training)
        logits = read_logits(model, words)
        for stream, place in product(range(2), range(1, BLOCK)):
            changed = words.clone()
            changed[stream, :, place] = (words[stream, :, place] + 1) % WORDS
            moved = (read_logits(model, changed) - logits).abs() > 1e-9
            assert not moved[:, :place].any(), (training, stream, place)
            assert moved[stream, place].any() and not moved[1 - stream].any()


REFUSED = {"teacher_routed", "hash_moe", "expert_choice", "soft_moe"}


@pytest.mark.parametrize("name", ["vmoe", "ermoe", "stable_moe", *sorted(REFUSED)])
def test_a_later_word_never_moves_an_earlier_logit(name):
    moe = MoESettings(router=METHODS[name].router, experts=METHODS[name].experts, blocks="all")
    if name in REFUSED:
        with pytest.raises(UserError, match=f"^router.kind: found {moe.router.kind}"):
            LanguageModel(width=8, heads=2).build(text(), moe)
    else:
        assert_causal(moe)


@pytest.mark.parametrize("sampling", ["bce", "predictor"])
def test_nor_does_depth_in_evaluation(sampling):
    moe = moe_of({"kind": "depth", "share": 0.5, "sampling": sampling})
    assert_causal(moe, modes=(False,))
    with pytest.raises(AssertionError):
        assert_causal(moe, modes=(True,))


def test_nor_does_a_hash_of_words_or_the_truth_of_later_ones():
    assert_causal(moe_of({"kind": "hash", "by": "word"}))
    moe = moe_of({"kind": "told"})
    assert_causal(moe, truth=WORDS)
    with pytest.raises(UserError, match=r"^router.kind: found told, which reads truth"):
        LanguageModel(width=8, heads=2).build(text(), moe)


LOOKAHEADS = [
    ("kind", {"kind": "expert_choice", "k": 1}),
    ("kind", {"kind": "soft_slots"}),
    ("kind", {"kind": "merged"}),
    ("k", LIMITED | {"k": 2}),
    ("batch_priority", LIMITED | {"batch_priority": True}),
    ("group_size", LIMITED | {"group_size": 2}),
    ("k", {"kind": "noisy_top_k", "k": 2, "eval_capacity_factor": 0.5, "group_size": 1}),
    ("router.k", {"kind": "frozen_copy", "router": LIMITED | {"k": 2}}),
    ("sampling", {"kind": "depth", "share": 0.5}),
]


@pytest.mark.parametrize(("key", "router"), LOOKAHEADS)
def test_what_looks_ahead_is_refused_and_would_move_earlier_logits(key, router, monkeypatch):
    moe = moe_of(router)
    with pytest.raises(UserError, match=f"^router.{key}: found .*; allowed"):
        LanguageModel(width=8, heads=2).build(text(), moe)
    monkeypatch.setattr(MoESettings, "check_text", lambda self, truth: None)
    with pytest.raises(AssertionError):
        assert_causal(moe)


@pytest.mark.parametrize(("key", "router"), LOOKAHEADS)
def test_a_causal_text_tower_refuses_them_and_one_with_full_attention_does_not(key, router):
    tower = TextTowerSettings(width=16, depth=1, heads=2, moe=moe_of(router))
    with pytest.raises(UserError, match=f"^text.router.{key}: found .*; allowed"):
        TextTransformer(tower, TASK)
    TextTransformer(tower.model_copy(update={"mask": "full"}), TASK)
