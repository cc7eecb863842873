"""Write docs/router_families.md: every mixture of the installed transformers, and its routing.

    python -m tools.router_families [FAMILY …]

Each family is built small, from its configuration, with random weights. Its routing is recorded by
``moecore.trace`` and compared with what its experts received. tests/lens/test_router_families.py
holds the page to this. Without a FAMILY the page is written, with some they are printed.
"""

import inspect
import re
import sys
from importlib import import_module  # noqa: TID251 (tools are part of no stage)
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.nn.routing_collection import FOREIGN_ROUTERS, routing_collector
from moecore.training.teachers.timm import define_missing_operators

define_missing_operators()  # before transformers imports torchvision

import transformers  # noqa: E402
from huggingface_hub.errors import StrictDataclassError  # noqa: E402

PAGE = Path("docs/router_families.md")
ROUTER = re.compile(r"^class (\w*(?:Router|TopKGating)|\w*MoE\w*Gate)\(", re.MULTILINE)
LAYERS = 4
NO_EXPERTS = {"granite_docling": "GraniteDoclingDensityRouter chooses between two connectors"}
UNREADABLE = {
    "doge": "DogeCDMoE chooses inside its block; no module returns the choice",
    "vitpose_backbone": "the expert is an input of the model, its data set",
}
# Sizes by the names of settings, the first that matches; others keep their default.
SIZES = (
    (r"vocab_size.*", 64),
    (r".*(hidden_size|d_model|embed_dim|n_embd)", 32),
    (r".*(intermediate_size|ffn_dim|d_ff|ffn_hidden_size)", 16),
    (r"num_hidden_layers|n_layers|num_layers|num_decoder_layers|\w+coder_layers|depth", LAYERS),
    (r".*(num_attention_heads|n_heads|num_heads|coder_attention_heads)", 4),
    (r".*(num_key_value_heads|kv_n_heads)", 4),
    (r".*(head_dim|d_kv|kv_channels|lora_rank)", 8),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 8),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"n_group|num_expert_group|expert_capacity|zero_expert_num", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers|n_shared_experts", 1),
    (r"max_position_embeddings", 256),
    (r"mamba_n_heads|mamba_num_heads", 4),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_state|ssm_state_size", 8),
    (r"image_size", 28),
    (r"patch_size", 14),
)
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
TWO_OF_EIGHT = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_ocr2": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {
        **TWO_OF_EIGHT,
        "per_layer_config": {"03": {"head_dim": 16}},
        "enable_moe_block": True,
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {"head_dim": 16, "per_layer_config": {"03": {}}},
    "ernie4_5_vl_moe": {"hidden_size": 512, "head_dim": 128},
    "gemma4": {
        **TWO_OF_EIGHT,
        "per_layer_config": {"03": {"head_dim": 16}},
        "enable_moe_block": True,
    },
    "glm4v_moe": {"hidden_size": 512, "head_dim": 128},
    "glm5_next": {"qk_rope_head_dim": 0, "head_dim": 0},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mimo_v2_flash": {
        "num_attention_heads": 8,
        "per_layer_config": {"01": {"num_key_value_heads": 4}},
        "rope_parameters": {
            kind: {**ROPE, "partial_rotary_factor": 0.5}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "mistral4": {
        "head_dim": 8,
        "rope_parameters": {
            **ROPE,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral_large4": {"kv_source_layers": [0, 1, 2, 3]},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p7": {"sliding_window": 4},
    "zaya": {"num_experts_per_tok": 1},
}


class FamilyRow(NamedTuple):
    """How the routers of one class of a family are read."""

    family: str
    router: str
    read: str
    received: str  # whether the experts received the recorded ids

    def line(self) -> str:
        """Return the row of the page's table."""
        return f"| {self.family} | {self.router} | {self.read} | {self.received} |"


def find_families() -> dict[str, list[str]]:
    """Return the folder of each family with a router → the names of its router classes."""
    models = Path(transformers.__file__).parent / "models"
    families = {}
    for file in sorted(models.glob("*/modeling_*.py")):
        routers = ROUTER.findall(file.read_text(encoding="utf-8"))
        if routers and file.parent.name not in NO_EXPERTS:
            families[file.parent.name] = [name for name in routers if "MLP" not in name]
    return families


def shrink_settings(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's settings with few layers, small widths, and ``other`` values."""
    names = ("num_hidden_layers", "n_layers", "num_layers")
    depth = next((settings[name] for name in names if isinstance(settings.get(name), int)), 0)
    shrunk = {}
    for name, value in settings.items():
        if name in ("transformers_version", "architectures"):
            continue
        if name in other:
            value = other[name]
        elif isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
            value = shrink_settings(value, other)
        elif name.endswith("token_id"):
            value = 0 if name == "pad_token_id" else value and 1
        elif isinstance(value, list) and len(value) == depth > LAYERS:
            value = [value[0], value[1], value[depth // 2], value[-1]]
        elif isinstance(value, int) and not isinstance(value, bool):
            sizes = (size for pattern, size in SIZES if re.fullmatch(pattern, name))
            value = next(sizes, value)
        shrunk[name] = value
    return shrunk


def find_models(family: str) -> list[type]:
    """Return the family's model classes, language models first."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [
        kind
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, transformers.PreTrainedModel)
        and kind.__module__ == module.__name__
        and re.search(r"For(CausalLM|ConditionalGeneration)$|Model$", name)
        and not name.endswith("PreTrainedModel")
    ]
    return sorted(kinds, key=lambda kind: not kind.__name__.endswith("ForCausalLM"))


def build_model(family: str, kind: Any) -> Any:
    """Return a small model of the class ``kind`` with random weights, its routers sure."""
    settings = kind.config_class().to_dict()
    config = kind.config_class(**shrink_settings(settings, OTHER_SETTINGS.get(family, {})))
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, value in model.named_parameters():
        is_sure = value.ndim < 2 or "router" in name or "gate." in name
        value.data = torch.randn(value.shape) * (1.0 if is_sure else 0.2)
    for name, value in model.named_buffers():
        if name.endswith("tid2eid"):  # DeepSeek-V4: the experts of each token, all 0 before
            value.copy_(torch.rand(len(value), 8).argsort(-1)[:, : value.shape[1]])
        elif "bias" in name:  # which changes the choice, not the weights: 0 before
            value.copy_(torch.rand(value.shape))
    return model


class ReceivedTokens:
    """What the experts of a model received, (N, E) bool per call of a layer, by forward hooks."""

    def __init__(self, model: nn.Module, routers: list[str]) -> None:
        """Hook all modules whose class ends in Experts, and the model's routers."""
        self.calls: list[Tensor] = []
        self.names: list[str] = []  # of the routers, in the order of calls
        self.tokens = torch.empty(0)
        for module in model.modules():
            name = type(module).__name__
            if name in routers:
                module.register_forward_hook(self.see_router)
            elif name.endswith("Experts") and not re.search("(?<!Moe)SharedExperts", name):
                module.register_forward_pre_hook(self.see_experts, with_kwargs=True)

    def see_router(self, router: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Store the tokens (N, d) that a router read, and its class."""
        self.tokens = inputs[0].flatten(0, -2)
        self.names.append(type(router).__name__)

    def see_experts(self, experts: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Store which tokens each expert gets, from the arguments of all experts of a layer."""
        hidden, *others = (*inputs, *named.values())
        if isinstance(experts, nn.ModuleDict):
            received = torch.zeros(len(hidden), len(experts), dtype=torch.bool)
            self.calls.append(received)
            for number, expert in enumerate(experts.values()):
                expert.register_forward_pre_hook(
                    lambda _, given, number=number: self.see_rows(received[:, number], given[0])
                )
        elif not others:  # Llama 4: all tokens for each expert, 0 for those that it does not get
            self.calls.append(hidden.unflatten(0, (experts.num_experts, -1)).any(-1).T)
        elif isinstance(others[0], list):  # JetMoE: the experts' tokens, one after another
            if len(self.calls) < len(self.names):
                received = torch.zeros(len(self.tokens), len(others[0]), dtype=torch.bool)
                for number, rows in enumerate(hidden.split(others[0])):
                    self.see_rows(received[:, number], rows)
                self.calls.append(received)
        else:
            chosen = torch.zeros(len(others[0]), 64, dtype=torch.bool)
            self.calls.append(chosen.scatter(-1, others[0], others[1] != 0))

    def see_rows(self, received: Tensor, rows: Tensor) -> None:
        """Mark in ``received`` (N,) the tokens whose vectors are in ``rows``, once each."""
        found = (self.tokens[:, None] == rows).all(-1)
        received |= found.any(1)

    def equals(self, number: int, record: RoutingRecord) -> bool:
        """Return whether the experts of a record with a weight are those of call ``number``."""
        weighted = (record.combine != 0).flatten(0, 1)
        received = self.calls[number]
        width = max(weighted.shape[1], received.shape[1])
        pairs = (weighted, received)
        first, second = (nn.functional.pad(part, (0, width - part.shape[1])) for part in pairs)
        return torch.equal(first, second)


def run_model(model: Any, routers: list[str]) -> tuple[ReceivedTokens, list[RoutingRecord]]:
    """Run a model on 3 texts of 7 words; return what its experts received, and the records."""
    words = torch.randint(2, 60, (3, 7))
    inputs = {"input_ids": words, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = words[:, :5]
    received = ReceivedTokens(model, routers)
    with torch.no_grad(), routing_collector(model) as records:
        model(**inputs)
    return received, records


def read_family(family: str) -> list[FamilyRow]:
    """Return the rows of a family, one per router class."""
    routers = find_families()[family]
    rows: dict[str, FamilyRow] = {}
    for kind in find_models(family):
        if len(rows) == len(routers):
            break
        try:
            received, records = run_model(build_model(family, kind), routers)
        except (StrictDataclassError, AttributeError, RuntimeError, TypeError, ValueError):
            continue  # needs images or sound, or other settings: its routers are "not run"
        except UserError as error:
            if "no known router" not in str(error):
                rows[routers[0]] = FamilyRow(family, routers[0], f"refused: {error}", "–")
            continue
        for name in dict.fromkeys(received.names):
            numbers = [i for i, other in enumerate(received.names) if other == name]
            is_equal = all(received.equals(number, records[number]) for number in numbers)
            read = "adapter" if name in (*FOREIGN_ROUTERS, "DbrxRouter") else "by what it returns"
            row = FamilyRow(family, name, read, "yes" if is_equal else "no")
            rows.setdefault(name, row)
    return [rows.get(name, FamilyRow(family, name, "not run", "–")) for name in routers]


def render_page() -> str:
    """Return the page: the table of all families."""
    rows = [row for family in find_families() for row in read_family(family)]
    others = {**UNREADABLE, **NO_EXPERTS}
    return "\n".join(
        [
            "# Families whose routing the lens reads",
            "",
            f"Written by `python -m tools.router_families` with transformers "
            f"{transformers.__version__}: {len(find_families())} families, {len(rows)} router "
            "classes. Each is built small, with random weights, run on 21 tokens and recorded with "
            "`moecore.trace`. *Received* says whether the recorded experts are those that the "
            "experts' module received.",
            "[How routers are recognised](tutorials/lens.md#records-of-a-model-of-transformers).",
            "",
            "NllbMoeExperts of this version takes a mask for expert ids, so that all tokens go "
            "to experts 0 and 1; the record has the experts that the router chose. *Not run*: "
            "routers of parts that read no text.",
            "",
            "| family | router | how it is read | received |",
            "| - | - | - | - |",
            *(row.line() for row in rows),
            "",
            "No router: " + "; ".join(f"{family} ({why})" for family, why in others.items()) + ".",
            "",
        ]
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(*(row.line() for row in read_family(name)), sep="\n")
    else:
        PAGE.write_text(render_page(), encoding="utf-8")
