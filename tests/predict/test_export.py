"""Exported models give the numbers of the model, for batches of other sizes than the traced one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moecore import export
from moecore.core.files import UserError
from moecore.nn.backbones.base_model import ImageSpec, Model
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.kernels.grouped import plain_operations_context
from moecore.nn.layers.moe import MoELayer, MoESettings
from moecore.nn.routers.base import Router
from moecore.nn.routers.expert_choice import ExpertChoice
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.soft_slots import SoftSlots
from moecore.predict import export as module
from moecore.predict.export import TensorsOnly, compare_outputs, draw_inputs, export_model
from moecore.tasks.next_token import NextToken
from moecore.training.artifacts import load_model, save_model
from moecore.training.guide import Guide, GuidedModel
from tests.methods import METHODS
from tests.training.small import IMAGE

WORDS = NextToken(words=11)
TEXT = ImageSpec(channels=2, size=(4,), mean=(0.0,) * 2, std=(1.0,) * 2, task=WORDS)
VIT = Vit(patch=4, width=16, depth=1, heads=2)
SWIN = Swin(patch=1, width=8, depths=(2,), heads=(1,), window=4)
TEXT_MODEL = LanguageModel(width=8, depth=1, heads=2, span=4)
TOP_K = {"kind": "noisy_top_k", "k": 2}
MLPS = {"kind": "mlp", "number": 4, "hidden_ratio": 1}


def moe(router: dict = TOP_K, experts: dict = MLPS) -> MoESettings:
    return MoESettings.model_validate({"router": router, "experts": experts, "blocks": "all"})


def of_method(name: str) -> MoESettings:
    """Router and experts of a method of params.yaml, in all blocks."""
    return METHODS[name].moe.model_copy(update={"blocks": "all"})


UNLIKE = {
    "vit": (VIT, IMAGE, moe(experts=MLPS | {"shared": 1, "activation": "swiglu"})),
    "swin": (SWIN, IMAGE, moe()),
    "language_model": (TEXT_MODEL, TEXT, moe({"kind": "top_k_softmax", "k": 2})),
    "eigen_experts": (VIT, IMAGE, of_method("ermoe")),
    "soft_slots": (VIT, IMAGE, of_method("soft_moe")),
    "moge": (VIT, IMAGE, of_method("moge")),
    "conv_stem": (VIT.model_copy(update={"stem": "conv"}), IMAGE, moe()),
}
OTHERS = {
    "merged": (VIT, IMAGE, moe({"kind": "merged"})),
    "expert_choice": (VIT, IMAGE, of_method("expert_choice")),
    "relu": (VIT, IMAGE, moe({"kind": "relu"})),
    "zero_computation": (VIT, IMAGE, moe(experts=MLPS | {"zero_computation": {}})),
    "depth": (VIT, IMAGE, moe({"kind": "depth", "router": TOP_K})),
}


def build(name: str) -> Model:
    backbone, image, settings = (UNLIKE | OTHERS)[name]
    torch.manual_seed(0)
    return backbone.build(image, settings).eval()


def save(folder: Path, model: Model) -> Path:
    folder.mkdir()
    save_model(folder, model)
    return folder


@pytest.mark.parametrize("name", UNLIKE | OTHERS)
def test_in_plain_operations_a_model_says_the_same(name):
    wrapped = TensorsOnly(build(name), records=True)
    inputs = draw_inputs(wrapped.model, 3)
    with torch.no_grad():
        expected = wrapped(inputs)
        with plain_operations_context():
            plain = wrapped(inputs)
        assert all(map(torch.equal, wrapped(inputs), expected))  # and as before outside
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", UNLIKE)
def test_an_onnx_file_gives_the_models_numbers(name, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="exports to ONNX need it")
    runtime = pytest.importorskip("onnxruntime", reason="runs what was exported")
    folder, out = save(tmp_path / "model", build(name)), tmp_path / "model.onnx"
    told = export_model(folder, "onnx", out, records=True)
    assert told.startswith(f"{out}: onnx, prediction, moe_1_logits, ") and "at most" in told
    wrapped = TensorsOnly(load_model(folder), records=True)
    session = runtime.InferenceSession(out, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == wrapped.output_names()
    inputs = draw_inputs(wrapped.model, 7)
    assert session.get_inputs()[0].shape == ["batch", *inputs.shape[1:]]
    given = session.run(None, {"inputs": inputs.numpy()})
    with torch.no_grad():
        for ours, theirs in zip(wrapped(inputs), given, strict=True):
            torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [of_method("expert_choice"), of_method("hash_moe")])
def test_a_program_of_torch_gives_the_models_numbers(settings, tmp_path):
    model = VIT.build(IMAGE, settings).eval()
    folder, out = save(tmp_path / "model", model), tmp_path / "model.pt2"
    assert export_model(folder, "torch", out).startswith(f"{out}: torch, prediction of a batch")
    program = torch.export.load(out).module()
    inputs = draw_inputs(model, 7)
    with torch.no_grad():
        [prediction] = program(inputs)
        torch.testing.assert_close(prediction, model(inputs).prediction, rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    """A user's module with one of our layers."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.moe = MoELayer(8, router, Mlp(number=4))

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.moe(self.up(tokens)) * scale[:, None, None]


@pytest.mark.parametrize("router", [NoisyTopK(k=2), ExpertChoice(), SoftSlots()])
def test_a_users_module_is_exported_for_other_batches_and_numbers_of_tokens(router):
    module = Own(router).eval()
    program = export(module, (torch.randn(3, 5, 6), torch.rand(3))).module()
    for number, tokens in ((1, 5), (7, 9)):
        inputs = torch.randn(number, tokens, 6), torch.rand(number)
        torch.testing.assert_close(program(*inputs), module(*inputs))
    with pytest.raises(UserError, match="^module: found training mode; allowed: module.eval"):
        export(module.train(), (torch.randn(3, 5, 6), torch.rand(3)))


def test_our_model_is_exported_with_its_records_and_what_fixes_its_batch_is_refused():
    model = build("vit")
    program = export(model, draw_inputs(model, 2)).module()
    inputs = draw_inputs(model, 5)
    torch.testing.assert_close(program(inputs), model(inputs))
    with pytest.raises(UserError, match="^export: cannot take any batch size: "):
        export(MoELayer(8, Hash(by="position"), Mlp(number=4)).eval(), torch.randn(6, 8))


@pytest.mark.parametrize("word", ["teacher", "truth", "eval_capacity_factor"])
def test_a_router_that_needs_more_than_the_input_is_refused(word, tmp_path):
    if word == "teacher":
        student = VIT.build(IMAGE, moe({"kind": "teacher_routed", "k": 2}))
        model = GuidedModel(student, Guide(VIT.build(IMAGE), (0,), 4, "mlp_input"))
    elif word == "truth":
        model = VIT.build(IMAGE.model_copy(update={"truth": 3}), moe({"kind": "told"}))
    else:  # inputs take each other's places
        model = VIT.build(IMAGE, moe(TOP_K | {"eval_capacity_factor": 1.0}))
    folder, out = save(tmp_path / "model", model.eval()), tmp_path / "model.pt2"
    with pytest.raises(UserError, match=f"{folder}: cannot be exported: the router .*{word}"):
        export_model(folder, "torch", out)
    assert not out.exists()


def test_an_operation_that_onnx_lacks_and_packages_that_are_not_there_are_named(
    tmp_path, monkeypatch
):
    model = VIT.build(IMAGE, of_method("expert_choice")).eval()
    folder, out = save(tmp_path / "model", model), tmp_path / "model.onnx"
    if module.find_spec("onnxscript"):
        with pytest.raises(UserError, match=f"{folder}: cannot be exported to onnx: .*sort"):
            export_model(folder, "onnx", out)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--to onnx: needs onnx, onnxscript"):
        export_model(folder, "onnx", out)
    assert not out.exists()


def test_numbers_that_are_not_the_models_are_refused():
    wrapped = TensorsOnly(build("vit"), records=False)
    with torch.no_grad():
        assert compare_outputs(wrapped, wrapped) == "at most 0 from the model's"
        with pytest.raises(UserError, match="prediction of the file and of the model"):
            compare_outputs(wrapped, lambda inputs: [wrapped(inputs)[0] + 1e-3])
