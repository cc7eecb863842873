"""Race of a language model's training step: ours, the loop over boolean masks, and a dense model of
equal active FLOPs; and the memory of a perplexity.

    python -m benchmarks.language [--rounds 8] [--words 13362] [--threads 2]
    python -m benchmarks.language --memory          # of a perplexity over 267,735 words

The model is MoGE's small one (table 10) with 12 streams of 256 tokens, what one of its GPUs reads
at a time; all experts take part. Contestants take turns in one process. "without the head": the
embedding of words and the logits over the vocabulary, which are the same in all, are left out.
"""

import argparse
import resource
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from benchmarks.timing import LEAST, Ratio, take_turns
from moecore.core.routing_records import RoutingContext
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.language_model import LanguageModel, LanguageTransformer
from moecore.nn.experts.mlp import Mlp, MlpExperts
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.nn.predict import text_perplexity
from moecore.nn.routers.top_k_softmax import TopKSoftmax
from moecore.tasks.next_token import NextToken
from moecore.training.runtime import tune_runtime
from moecore.training.settings import Training, build_optimizer

STREAMS, BLOCK = 12, 256
K = 2
TARGET = 1.15  # ours / dense


class MaskedExperts(nn.Module):
    """The MoE layer as a loop over boolean masks, with router and weights of our layer."""

    def __init__(self, layer: MoEFeedForward) -> None:
        super().__init__()
        self.router, self.experts = layer.router, layer.experts
        self.wants = layer.wants

    def forward(self, tokens: Tensor, context: RoutingContext = RoutingContext()) -> tuple:
        _, record = self.router(tokens, context)
        experts = self.experts
        assert isinstance(experts, MlpExperts)
        outputs = torch.zeros_like(tokens)
        for expert in range(len(experts.up)):
            chosen = record.chosen[..., expert]
            hidden = relu(tokens[chosen] @ experts.up[expert] + experts.up_bias[expert])
            own = hidden @ experts.down[expert] + experts.down_bias[expert]
            weight = record.combine[..., expert][chosen].unsqueeze(-1)
            outputs[chosen] += (weight * own).to(outputs.dtype)
        return outputs, (record,)


class Step(NamedTuple):
    """The model, optimizer and batch of a training step."""

    model: LanguageTransformer
    optimizer: torch.optim.Optimizer
    words: Tensor  # (streams, 1, M)
    labels: Tensor
    dtype: torch.dtype
    head: bool

    def run(self) -> None:
        """Compute forward, loss, backward and update."""
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            if self.head:
                said = self.model(self.words).prediction
            else:
                final = self.model.encode(self.words)[0]
        if self.head:
            loss = self.model.image.task.loss(said, self.labels)
        else:
            loss = final.float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def spec(words: int) -> ImageSpec:
    """Describe a text with a vocabulary of ``words``."""
    task = NextToken(words=words)
    return ImageSpec(channels=1, size=(BLOCK,), mean=(0.0,), std=(1.0,), task=task)


def build_language_model(words: int, sparse: bool) -> LanguageTransformer:
    """Build Table 10's small model without dropout; the dense one is as wide as k experts."""
    torch.manual_seed(0)
    experts = Mlp(number=16, hidden_ratio=1, activation="relu", init="flat")
    moe = MoESettings(router=TopKSoftmax(k=K), experts=experts, blocks="all") if sparse else None
    settings = LanguageModel(width=128, depth=3, heads=8, span=256, dropout=0, mlp_ratio=K)
    return settings.build(spec(words), moe).train()


def step(who: str, words: int, dtype: torch.dtype, head: bool) -> Callable[[], None]:
    """Return a contestant's step on random words; without ``head`` the loss is on features."""
    model = build_language_model(words, who != "dense")
    if who == "loop":
        for block in model.blocks:
            block.mlp = MaskedExperts(block.mlp)
    model.remember(STREAMS)
    settings = {"epochs": 1, "batch": STREAMS, "learning_rate": 1e-3, "optimizer": {"kind": "adam"}}
    optimizer = build_optimizer(model, Training.model_validate(settings))
    drawn = torch.randint(words, (STREAMS, BLOCK + 1), generator=torch.Generator().manual_seed(0))
    return Step(model, optimizer, drawn[:, None, :-1], drawn[:, 1:], dtype, head).run


def race(words: int, rounds: int) -> None:
    """Print our tokens per second, and our time divided by the others'."""
    for dtype in (torch.float32, torch.bfloat16):
        for head in (True, False):
            runs = {who: step(who, words, dtype, head) for who in ("ours", "dense", "loop")}
            seconds = take_turns(runs, rounds)
            own = min(seconds["ours"])
            part = "whole step" if head else "without the head"
            what = f"{str(dtype).removeprefix('torch.')}, {part}"
            print(f"{what}: {STREAMS * BLOCK / own:,.0f} tokens/s, {1e3 * own:.0f} ms a step")
            for other in ("dense", "loop"):
                found = Ratio.of(seconds["ours"], seconds[other])
                to_reach = f", to reach {TARGET}" if other == "dense" else ""
                print(
                    f"  over {other}: {found.median:.2f} ({found.low:.2f} to {found.high:.2f}; "
                    f"minima {found.minimum:.2f}{to_reach})",
                    flush=True,
                )


def memory() -> None:
    """Print the memory that a perplexity over WikiText-103's vocabulary adds to the process."""
    model = build_language_model(267_735, True).eval()
    drawn = torch.randint(267_735, (1, 96 * (BLOCK + 1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text_perplexity(model, drawn, 96)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    every = 96 * BLOCK * 267_735 * 4 / 2**30
    print(f"perplexity of 96 streams of {BLOCK} tokens over 267,735 words:")
    print(f"{(after - before) / 1024:.0f} MiB above the {before / 1024:.0f} MiB of the model;")
    print(f"its logits alone, all at once, are {every:.0f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=LEAST)
    parser.add_argument("--words", type=int, default=13_362, help="of the vocabulary")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--memory", action="store_true", help="of a perplexity, and no race")
    options = parser.parse_args()
    tune_runtime()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory:
        memory()
    else:
        race(options.words, options.rounds)


if __name__ == "__main__":
    main()
