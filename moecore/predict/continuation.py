"""Continue a prompt with a language model, and show the experts of every word."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core import config, routing_records, streams
from moecore.core.files import UserError, write_atomic
from moecore.data.layouts.text import UNKNOWN
from moecore.data.text.words import WordSplitting, read_vocabulary, split_prompt_words
from moecore.measure.routing_metrics.expert_profiles import experts_by_weight
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.predict.model_quality import describe_model_quality
from moecore.report.figures.drawing import expert_colours
from moecore.report.page.report_page import template_environment
from moecore.training import artifacts, runtime

MAX_EXPERTS = 2  # shown per word


class Sampling(NamedTuple):
    new_words: int = 50
    temperature: float = 0.0  # divides the logits; 0: always the most probable word
    top_p: float = 1.0  # draw among the most probable words with this total probability
    seed: int = 0


class WordSplittingSettings(config.Config):
    """The file ``text.json`` of a model: how a text is split into words."""

    reading: WordSplitting


class WordWithExperts(NamedTuple):
    word: str
    is_prompt: bool
    experts: list[list[int]]  # per layer: the experts that process it, most weight first


class Continuation(NamedTuple):
    text: list[WordWithExperts]  # prompt and continuation
    remarks: list[str]


def continue_and_print(folder: Path, prompt: Path, out: Path, sampling: Sampling) -> None:
    continuation = continue_prompt_and_write_page(folder, prompt, out, sampling)
    print(" ".join(word.word for word in continuation.text if not word.is_prompt))
    for remark in (*continuation.remarks, f"{out}: every word with its experts"):
        print(remark, file=sys.stderr)


def continue_prompt_and_write_page(
    folder: Path, prompt: Path, out: Path, sampling: Sampling
) -> Continuation:
    """Continue the text file ``prompt`` with the model in ``folder``; write the page ``out``."""
    model = artifacts.load_model(folder)
    if not isinstance(model, LanguageTransformer):
        takes = "--prompt takes one of text, and others take FOLDER"
        raise UserError(f"{folder}: found a model of images; {takes}")
    if model.moe is not None and "truth" in model.moe.router.wants:
        raise UserError(f"{folder}: is routed by the truth, which a prompt does not say")
    vocabulary = read_vocabulary(folder, model.image.outputs)
    try:
        text = prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{prompt}: {reason}; --prompt is a file of text in UTF-8") from error
    if not text.strip():
        raise UserError(f"{prompt}: found no word; --prompt is a file with the beginning of a text")
    path = folder / "text.json"
    settings = config.read_json_settings(path, WordSplittingSettings, "the reading of a text")
    prompt_words = split_prompt_words(text, settings.reading)
    model = model.to(runtime.tune_runtime().device)
    continuation = continue_words(model, vocabulary, prompt_words, sampling)
    continuation.remarks.insert(0, describe_model_quality(folder))
    experts = 0 if model.moe is None else model.moe.experts.choices
    # The text once per layer, words in the colour of their first expert
    layers = [
        {expert: count_expert_words(continuation.text, layer, expert) for expert in range(experts)}
        for layer in range(len(continuation.text[0].experts))
    ]
    colours = expert_colours(experts)
    template = template_environment().get_template("continued.html.jinja")
    page = template.render(model=folder, continuation=continuation, colours=colours, layers=layers)
    write_atomic(out, page)
    return continuation


@torch.no_grad()
def continue_words(
    model: LanguageTransformer, vocabulary: Sequence[str], prompt: Sequence[str], sampling: Sampling
) -> Continuation:
    """Return the prompt and the ``sampling.new_words`` words that the model adds, with experts."""
    numbers = {word: number for number, word in enumerate(vocabulary)}
    unknown = list(dict.fromkeys(word for word in prompt if word not in numbers))
    device = model.positions.device
    drawing = streams.generator_for(sampling.seed)
    tokens = torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in prompt], device=device)
    states = model.initial_states(1, device)
    shown: list[WordWithExperts] = []
    ahead = torch.empty(0)
    for part in tokens.split(model.image.shape[0]):
        ahead, records, states = _logits_after_tokens(model, part, states)
        names = [vocabulary[token] for token in part.tolist()]
        shown += _words_with_experts(names, records, is_prompt=True)
    for _ in range(sampling.new_words):
        token = sample_token(ahead, sampling, drawing)
        part = torch.tensor([token], device=device)
        ahead, records, states = _logits_after_tokens(model, part, states)
        shown += _words_with_experts([vocabulary[token]], records, is_prompt=False)
    how = "the most probable word each time"
    if sampling.temperature:
        how = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    remarks = [f"{how}, seed {sampling.seed}"]
    if unknown:
        remarks.append(f"not in the vocabulary, read as {UNKNOWN}: {', '.join(unknown)}")
    return Continuation(shown, remarks)


def _logits_after_tokens(
    model: LanguageTransformer, tokens: Tensor, states: Tensor
) -> tuple[Tensor, tuple[routing_records.RoutingRecord, ...], Tensor]:
    """Read tokens (M,); return the next word's logits (V,), routing records, and the new cache."""
    (final, records, _), states = model.read(tokens[None], states)
    return model.predict(final[:, -1:])[0, 0].float().cpu(), records, states


def _words_with_experts(
    names: Sequence[str], records: Sequence[routing_records.RoutingRecord], is_prompt: bool
) -> list[WordWithExperts]:
    layers = [experts_by_weight(record.combine[0].cpu(), MAX_EXPERTS) for record in records]
    return [
        WordWithExperts(word, is_prompt, [layer[place] for layer in layers])
        for place, word in enumerate(names)
    ]


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a word's index from logits (V,); the largest logit's index at temperature 0."""
    if not sampling.temperature:
        return int(logits.argmax())
    # Relative to the largest: with a tiny temperature, ∞ − ∞ would be NaN.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    probs, order = scaled.softmax(dim=0).sort(descending=True)
    mass_before = probs.cumsum(dim=0) - probs  # 0 for the most probable word, which always stays
    top_p_probs = torch.where(mass_before < sampling.top_p, probs, 0)
    return int(order[torch.multinomial(top_p_probs, 1, generator=generator)])


def count_expert_words(
    text: Sequence[WordWithExperts], layer: int, expert: int
) -> list[tuple[str, int]]:
    return Counter(word.word for word in text if word.experts[layer][:1] == [expert]).most_common()
