from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore import UserError, export
from moecore.backbones import LanguageModel, Swin, Vit
from moecore.core.streams import generator_for
from moecore.data.text.words import read_vocabulary
from moecore.nn.backbones.base_model import ImageSpec, Model
from moecore.nn.experts.mlp import Mlp
from moecore.nn.kernels.grouped import tracing_for_export
from moecore.nn.layers.moe import MoELayer, MoESettings
from moecore.pipeline.predict_cli import main
from moecore.predict import export as module
from moecore.predict.continuation import (
    Sampling,
    continue_prompt_and_write_page,
    continue_words,
    sample_token,
)
from moecore.predict.export import TensorsOnly, compare_outputs, draw_inputs, export_model
from moecore.routers import ExpertChoice, Hash, NoisyTopK, Router, SoftSlots, Told
from moecore.tasks.next_token import NextToken
from moecore.training.artifacts import load_model, save_model
from moecore.training.method import Guide, TeacherRoutedModel
from tests.browser import opened
from tests.lens.test_lens import trained
from tests.measure.subjects import built, digits
from tests.measure.test_truth import text_subject
from tests.measure.test_words import subject
from tests.methods import METHODS
from tests.training.small import IMAGE

WORDS = NextToken(words=11)
TEXT = ImageSpec(channels=2, size=(4,), mean=(0.0,) * 2, std=(1.0,) * 2, task=WORDS)
VIT = Vit(patch=4, width=16, depth=1, heads=2)
SWIN = Swin(patch=1, width=8, depths=(2,), heads=(1,), window=4)
TEXT_MODEL = LanguageModel(width=8, depth=1, heads=2, span=4)
TOP_K = {"kind": "noisy_top_k", "k": 2}
MLPS = {"kind": "mlp", "number": 4, "hidden_ratio": 1}
__all__ = ["subject", "trained"]


def moe(router: dict = TOP_K, experts: dict = MLPS) -> MoESettings:
    return MoESettings.model_validate({"router": router, "experts": experts, "blocks": "all"})


def of_method(name: str) -> MoESettings:
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
        with tracing_for_export():
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
        model = TeacherRoutedModel(student, Guide(VIT.build(IMAGE), (0,), 4, "mlp_input"))
    elif word == "truth":
        model = VIT.build(IMAGE.model_copy(update={"truth": 3}), moe({"kind": "told"}))
    else:  # inputs take each other's places
        model = VIT.build(IMAGE, moe(TOP_K | {"eval_capacity_factor": 1.0}))
    folder, out = save(tmp_path / "model", model.eval()), tmp_path / "model.pt2"
    with pytest.raises(UserError, match=f"{folder}: cannot be exported: the router .*{word}"):
        export_model(folder, "torch", out)
    assert not out.exists()


def test_an_operation_that_onnx_lacks_and_missing_packages_are_named(tmp_path, monkeypatch):
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


def prompt(tmp_path, text="the tensor of unheard words , and the matrix of"):
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_likeliest_words_are_those_of_the_whole_text_read_anew(subject):
    words = ["<eos>", "the", "tensor", "of", "value", "and", "matrix", "returns"]
    vocabulary = read_vocabulary(subject.data.folder, 12)
    found = continue_words(subject.model, vocabulary, words, Sampling(new_words=9))
    tokens = [vocabulary.index(word) for word in words]
    for word in [one.word for one in found.text if not one.is_prompt]:
        # one block of all that there is, from an empty cache
        with torch.no_grad():
            states = subject.model.initial_states(1, torch.device("cpu"))
            for start in range(0, len(tokens), 3):
                part = torch.tensor([tokens[start : start + 3]])
                (final, _, _), states = subject.model.read(part, states)
            best = int(subject.model.predict(final[:, -1:]).argmax())
        assert vocabulary[best] == word
        tokens.append(best)
    assert [len(one.experts) for one in found.text] == [2] * 17
    assert all(len(layer) == 2 for one in found.text for layer in one.experts)


def test_words_are_drawn_from_the_likeliest():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    probs = logits.double().softmax(0)
    assert sample_token(logits, Sampling(), generator_for(0)) == 1
    generator = generator_for(1)
    every = [sample_token(logits, Sampling(temperature=1.0), generator) for _ in range(4000)]
    assert np.abs((np.bincount(every, minlength=4) / 4000) - probs.numpy()).max() < 0.03
    few = {sample_token(logits, Sampling(temperature=1, top_p=0.7), generator) for _ in range(200)}
    assert few == {1, 2}  # 0.64 alone is less than 0.7
    assert {sample_token(logits, Sampling(temperature=1.0, top_p=1e-9), generator)} == {1}


def test_the_command_prints_words_and_writes_the_page(trained, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = [str(trained), "--prompt", str(prompt(tmp_path)), "--out", str(page), "--words", "5"]
    with pytest.raises(SystemExit, match="^0$"):
        main(words)
    out, err = capsys.readouterr()
    assert len(out.split()) == 5
    assert err.splitlines() == [
        f"how good this model is was not measured: there is no {trained}/score.json",
        "the most probable word each time, seed 0",
        "not in the vocabulary, read as <unk>: unheard, words",
        f"{page}: every word with its experts",
    ]
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>MoE layer") == 2 and text.count('class="added"') == 10
    assert "&lt;eos&gt;" in text and "expert 3" in text


def test_draws_are_those_of_the_seed(subject):
    vocabulary = read_vocabulary(subject.data.folder, 12)
    drawn = [Sampling(12, 1.0, 1.0, seed) for seed in (0, 0, 1)]
    texts = [continue_words(subject.model, vocabulary, ["<eos>"], one).text for one in drawn]
    said = [[one.word for one in text] for text in texts]
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--prompt x --words 0", "Invalid value for '--words'"),
        ("--prompt x --temperature -1", "Invalid value for '--temperature'"),
        ("--prompt x --top-p 1.5", "Invalid value for '--top-p'"),
        ("FOLDER --prompt x", "either FOLDER, or --prompt"),
        ("FOLDER --package os", "--package: found os; allowed: "),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, options, says):
    page = tmp_path / "a.html"
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *options.split(), "--out", str(page)])
    assert says in f"{ended.value} {capsys.readouterr().err}" and not page.exists()


def test_bad_prompts_and_models_are_refused(trained, tmp_path):
    out = tmp_path / "a.html"
    with pytest.raises(UserError, match=r"prompt.txt: found no word"):
        continue_prompt_and_write_page(trained, prompt(tmp_path, " \n"), out, Sampling())
    with pytest.raises(UserError, match=r"none.txt: No such file"):
        continue_prompt_and_write_page(trained, tmp_path / "none.txt", out, Sampling())
    pictures = built(Vit(patch=6, width=8, depth=1, heads=1), None, digits(tmp_path / "digits"), 1)
    told = text_subject(Told()).model
    for model, says in (
        (pictures, "found a model of images; --prompt takes one of text"),
        (told, "is routed by the truth, which a prompt "),
    ):
        (tmp_path / "other").mkdir(exist_ok=True)
        save_model(tmp_path / "other", model)
        with pytest.raises(UserError, match=f"^{tmp_path / 'other'}: {says}"):
            continue_prompt_and_write_page(tmp_path / "other", prompt(tmp_path), out, Sampling())
    assert not out.exists()


def test_the_page_fits(browser, trained, tmp_path):
    page = tmp_path / "page.html"
    continue_prompt_and_write_page(trained, prompt(tmp_path), page, Sampling(new_words=40))
    with opened(browser, page, 390, "dark") as shown:
        assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert shown.locator("h2").count() == 2
