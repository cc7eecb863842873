import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from moecore.core.files import UserError
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens import Trace, analyse_trace, build_record, traces, write_trace
from moecore.lens.page import render_trace_page, write_lens_pages
from moecore.lens.recording import record_python_file, record_trained_model
from moecore.measure.routing_metrics import layer_metrics
from moecore.measure.routing_metrics.choice_patterns import choice_margin, mean_pair_lift_by_image
from moecore.measure.routing_metrics.layer_metrics import expert_counts, load_shares
from moecore.nn.backbones.vit import Vit
from moecore.nn.predict import concat_records, predict_in_batches
from moecore.pipeline.cli import app
from moecore.training.artifacts import save_model, save_vocab
from tests.browser import opened
from tests.measure.subjects import built, digits
from tests.measure.test_words import MOE, subject

__all__ = ["subject"]
FILE = """\
import torch
from torch import nn
import moecore

class Gate(nn.Linear):
    def forward(self, tokens):
        return super().forward(tokens).softmax(-1).topk(2)

def read(gate, inputs, output):
    logits = nn.functional.linear(inputs[0], gate.weight, gate.bias)
    return moecore.lens.build_record(logits, output.indices, output.values)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.gate = nn.Embedding(9, 8), Gate(8, 4)
    def forward(self, input_ids, attention_mask=None):
        return self.gate(self.words(input_ids))

torch.manual_seed(0)
model, adapters = Model(), {"Gate": read}
batches = [{"input_ids": torch.randint(9, (2, 5))} for _ in range(3)]
vocabulary = "the of and tensor matrix vector value 12 returns".split()
"""
MASK = "{'input_ids': torch.ones(2, 5).long(), 'attention_mask': torch.tensor([[1, 0]])}"
BUILD = "moecore.lens.build_record(torch.randn(2, 5, 2), output.indices, output.values)"
DIVIDED = r"own.py: ZeroDivisionError: division by zero \(.*own.py:"
CHUNK, LAYER = {"file": "00000.safetensors", "items": 6}, {"experts": 4, "tokens": 5}
EXPERTS = torch.full((6, 5, 2), 4)
ONES = torch.ones(2, 3).long()


@pytest.fixture
def trained(subject, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, subject.model)
    save_vocab(folder, subject.data)
    return folder


@pytest.fixture
def recorded(tmp_path):
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    record_python_file(tmp_path / "own.py", tmp_path / "trace")
    return tmp_path / "trace"


def records_of(items, *chosen, experts=4):
    """A layer for each: so many experts of every token, drawn."""
    logits = torch.randn(len(chosen), items, 3, experts)
    pairs = zip(logits, chosen, strict=True)
    tops = [(one, one.topk(k).indices, one.softmax(-1).topk(k).values) for one, k in pairs]
    return [build_record(*top) for top in tops]


def test_the_lens_of_our_language_model_equals_its_records(subject, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "PROBABILITIES_PER_FILE", 1)  # a file a batch
    images = subject.data.test.images
    assert record_trained_model(trained, subject.data.folder, tmp_path / "trace") == len(images)
    trace = Trace(tmp_path / "trace")
    _, records = predict_in_batches(subject.model, images)
    assert len(trace.card.chunks) > 1 and len(trace.card.layers) == len(records) == 2
    some = np.array([1, 64, len(images) - 1])
    for number, record in enumerate(records):
        for name, value in trace.layer(number)._asdict().items():
            torch.testing.assert_close(value, getattr(record, name))  # another pass
        assert torch.equal(trace.layer(number, some).combine, trace.layer(number).combine[some])
    assert torch.equal(
        trace.item_tensor("tokens"), torch.from_numpy(images[:, -1].astype(np.int64))
    )
    numbers = analyse_trace(trace)
    for layer, record in zip(numbers.layers, records, strict=True):
        expected = layer_metrics.measure_layer_use(record, None, 2)
        assert layer.load == pytest.approx(load_shares(expert_counts(record.chosen)).tolist())
        for name in ("load_cv2", "entropy", "token_entropy", "tail_of_probs"):
            assert layer.quantities[name].value == pytest.approx(expected[name])
        margin = choice_margin(record.probs, record.chosen).mean()
        assert layer.quantities["margin"].value == pytest.approx(float(margin))
        lift = mean_pair_lift_by_image(record.chosen).mean()
        assert layer.quantities["pair_lift"].value == pytest.approx(float(lift))
        lowest = 2 * 2 / (4 + 2)  # θ = 0: 2k/(E+k)
        assert lowest <= layer.quantities["consistency_4"].value <= 1
        assert set(layer.chances) >= {"max_violation", "pair_lift", "consistency_4"}
    assert {"information_word", "information_position"} <= {*numbers.mean}
    assert "information_layer_before" not in numbers.layers[0].quantities
    assert numbers.mean["information_layer_before"].limits


def test_images_come_with_their_classes(tmp_path):
    data = digits(tmp_path / "digits")
    model = built(Vit(patch=6, width=8, depth=2, heads=1), MOE, data, 1.5)
    for name, one in (("model", model), ("dense", built(model.config, None, data, 1.5))):
        (tmp_path / name).mkdir()
        save_model(tmp_path / name, one)
    out = tmp_path / "trace"
    assert record_trained_model(tmp_path / "model", data.folder, out, items=20) == 20
    trace, places = Trace(out), evenly_spaced_indices(60, 20)
    assert torch.equal(trace.item_tensor("labels"), torch.from_numpy(data.test.labels[places]))
    assert trace.item_tensor("tokens") is None
    assert "Words" not in render_trace_page(trace, analyse_trace(trace))
    _, (record, _) = predict_in_batches(model, data.test.images[places])
    torch.testing.assert_close(trace.layer(0).probs, record.probs)
    with pytest.raises(UserError, match="^trace: PatchTransformer has no known router"):
        record_trained_model(tmp_path / "dense", data.folder, out)


def test_choices_of_any_number_and_dropped_ones_come_back(tmp_path):
    first, second = records_of(2, 1, 3), records_of(2, 3, 2)
    kept = torch.rand(2, 3, 4) > 0.5
    first[1] = first[1]._replace(combine=first[1].combine * kept)
    with write_trace(tmp_path / "trace", "drawn") as trace:
        trace.add(first)
        trace.add(second)
    trace = Trace(tmp_path / "trace")
    assert [layer.k for layer in trace.card.layers] == [3, 3]
    for number, pair in enumerate(zip(first, second, strict=True)):
        (both,) = concat_records([(record,) for record in pair])
        for name, value in trace.layer(number)._asdict().items():
            assert torch.equal(value, getattr(both, name))
    dropped = analyse_trace(trace).layers[1].quantities["dropped"].value
    assert dropped == pytest.approx(int((first[1].chosen & ~kept).sum()) / (6 * 3 + 6 * 2))


def one_expert_an_item(experts, number):
    """Every token of an item chooses the same one, of so many: a record."""
    told = torch.nn.functional.one_hot(experts, number).float()[:, None]
    told = told.expand(len(experts), 3, number)
    return build_record(told, told.topk(1).indices, told.topk(1).values)


def test_labels_and_another_trace_are_compared_with(tmp_path):
    """An item's expert is its label; in the other trace every expert has another number."""
    labels = torch.arange(24) % 4
    unsure = torch.where(torch.arange(24) != 3, labels, -100)
    for name, experts in (("ours", labels), ("theirs", (labels + 1) % 4)):
        with write_trace(tmp_path / name, name) as trace:
            trace.add([one_expert_an_item(experts, 4)], labels=unsure)
    ours, theirs = (Trace(tmp_path / name) for name in ("ours", "theirs"))
    numbers = analyse_trace(ours, against=theirs)
    (layer,) = numbers.layers
    assert layer.quantities["purity"].value == numbers.mean["purity"].value == 1
    assert layer.quantities["p_label"].value < 0.01 < 0.3 < layer.chances["purity"] < 0.6
    for name in ("matched_correlation", "matched_overlap"):
        assert layer.quantities[name].value == pytest.approx(1) and layer.chances[name] < 0.7
    assert layer.quantities["entropy"].value == pytest.approx(1)
    assert analyse_trace(ours, items=5).items == 5
    with pytest.raises(UserError, match="found 3 images .*; allowed: 4 and more"):
        analyse_trace(ours, items=3, against=theirs)
    for name, experts, problem in (
        ("short", labels[:8], r"short: found items, .*\(8, .*; allowed: \(24, "),
        ("other", labels, "other: found other labels than in .*ours; allowed: a trace of the same"),
    ):
        with write_trace(tmp_path / name, name) as trace:
            trace.add([one_expert_an_item(experts, 4)], labels=experts)
        with pytest.raises(UserError, match=problem):
            analyse_trace(ours, against=Trace(tmp_path / name))


def test_experts_of_single_items_tell_no_unrelated_labels(tmp_path):
    # Each item has an expert of its own: whatever its label, it is told, so nothing is beyond
    # chance. Of three items nothing can be said, and of one label neither.
    with write_trace(tmp_path / "trace", "own") as trace:
        trace.add([one_expert_an_item(torch.arange(40), 40)], labels=torch.arange(40) // 10)
    trace = Trace(tmp_path / "trace")
    layer = analyse_trace(trace).layers[0]
    assert layer.quantities["information_label"].value == pytest.approx(0, abs=1e-12)
    assert layer.quantities["p_label"].value == layer.chances["purity"] == 1
    few = analyse_trace(trace, items=3)
    assert "purity" not in few.mean and "information_label" not in few.mean
    assert "found 3 items; allowed: 4 or more" in few.remarks[0]
    with write_trace(tmp_path / "trace", "own") as trace:
        trace.add([one_expert_an_item(torch.arange(40), 40)], labels=torch.zeros(40).long())
    same = analyse_trace(Trace(tmp_path / "trace"))
    assert "purity" not in same.mean and "found one label; allowed: two" in same.remarks[0]


def test_the_commands_record_a_file_and_write_the_page(browser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    said = "trace: 6 items; next: moecore lens read trace"
    for words, told in (("record own.py", said), ("read trace --against trace", "Matched experts")):
        done = CliRunner().invoke(app, ["lens", *words.split()])
        assert done.exit_code == 0 and told in done.output, done.output
    with opened(browser, tmp_path / "lens.html", 390, "dark") as shown:
        assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert shown.locator("h1").inner_text() == "What the routers of Model do"
        assert shown.locator("#words .text span").count() == 30
        # quantities, all layers, the only one
        assert shown.locator("#layers thead th").count() == 3


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("batches = None", r"own.py: found Model model, NoneType batches; allowed: "),
        ("vocabulary = ['a', 'of']", r"trace: tokens: found \d; allowed: 0 to 1, .*: is it of an"),
        (f"batches = [{MASK}]", r"attention_mask: found 0; allowed: 1; cut texts to parts of one"),
        ("batches += [{'input_ids':torch.ones(2,4).long()}]", r"trace: .* \[\(5, 4\)\], as before"),
        ("1 / 0", rf"{DIVIDED}24\)"),
        ("def forward(self, input_ids):\n    1 / 0\nModel.forward = forward", rf"{DIVIDED}25\)"),
        ("model.gate = Gate(9, 4)", r"own.py: RuntimeError: .* \(.*own.py:7\)"),
        ("def drawn():\n    yield 1 / 0\nbatches = drawn()", rf"{DIVIDED}25\)"),
        ("batches = [(batches[0], torch.zeros(2))]", "batches: found a tuple of dict, Tensor; all"),
        ("batches = [(batches[0], {'labels': torch.ones(2)})]", "^trace: labels: .*; allowed: int"),
        ("vocabulary = 3", r"^vocabulary: found int 3; allowed: a list of words"),
        ("vocabulary = list(range(9))", r"^vocabulary: found int 0; allowed: a list of words"),
        ("name = 3", r"^name: found int; allowed: a text"),
        ("adapters = {'Gate': 3}", r"^adapters.Gate: found int; allowed: the name of a router's"),
        ("adapters = [read]", r"^adapters: found list; allowed: the name of a router's class"),
        ("adapters = {'Gate': print}", r"^adapters.Gate: found NoneType; allowed: a RoutingRecord"),
        (
            "adapters = {'Gate': lambda *given: read(*given)._replace(combine=None)}",
            r"^adapters.Gate: combine: found NoneType; allowed: a tensor",
        ),
        (
            f"adapters = {{'Gate': lambda gate, inputs, output: {BUILD}}}",
            r"^build_record: experts: found [23]; allowed: integers from 0 to 1",
        ),
    ],
)
def test_a_file_that_gives_something_else_is_refused(tmp_path, end, problem):
    (tmp_path / "own.py").write_text(FILE + end, encoding="utf-8")
    with pytest.raises(UserError, match=problem) as error:
        record_python_file(tmp_path / "own.py", tmp_path / "trace")
    assert "\n" not in str(error.value) and not (tmp_path / "trace").exists()


def write_card(folder, **changes):
    path = folder / "trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_file(folder):
    path = folder / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (partial(write_card, format=3), "json: format: found 3; allowed: 1 or 2"),
        (
            partial(write_card, chunks=[CHUNK] * 2),
            "trace.json: chunks: found .*; allowed: each once",
        ),
        (partial(write_card, layers=[LAYER | {"k": 1}]), "of them 1 at most per token"),
        (partial(write_card, layers=[LAYER | {"k": 9}]), "of them 9 at most per token"),
        (partial(write_card, layers=[]), r"layers: found \[\]; Tuple should"),
        (lambda folder: (folder / "trace.json").write_text("{"), "JSON: found .*; Invalid JSON"),
        (lambda folder: (folder / "trace.json").unlink(), "trace.json: No such file"),
        (cut_file, "00000.safetensors: missing, damaged or cut off"),
        (lambda folder: (folder / "00000.safetensors").unlink(), "safetensors: missing, damaged"),
    ],
)
def test_a_damaged_trace_is_one_line(recorded, tmp_path, damage, problem):
    damage(recorded)
    with pytest.raises(UserError, match=problem) as error:
        write_lens_pages(recorded, tmp_path / "lens.html")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("0.probs", None, "found no 0.probs"),
        ("0.probs", torch.ones(6, 5, 3), "found other shapes"),
        ("0.probs", torch.full((6, 5, 4), torch.nan), "probs: found nan; allowed: finite numbers"),
        ("0.experts", EXPERTS, "or other experts"),
        ("0.experts", EXPERTS - 1, "0.experts: found an expert twice"),
        ("0.experts", EXPERTS - 1.0, "allowed: int"),
        ("0.experts", EXPERTS > 4, "allowed: int"),
        ("0.experts", torch.tensor([0, -2]).expand(6, 5, 2).clone(), "found an expert below -1"),
        ("0.experts", EXPERTS - 5, "or other experts, or none"),
        ("0.experts", torch.tensor([0, -1]).expand(6, 5, 2).clone(), "weight of the expert -1"),
        ("0.probs", torch.ones(6, 5, 4), "0.probs: found sum 4; allowed: 1"),
        ("0.probs", torch.ones(6, 5, 4).long(), "0.probs: found torch.int64; allowed: floating"),
        ("0.weights", torch.ones(6, 5, 2).bool(), "0.weights: found torch.bool"),
        ("0.weights", torch.full((6, 5, 2), torch.inf), "0.weights: found inf"),
        ("tokens", torch.full((6, 5), 9), "tokens: found 9"),
        ("tokens", torch.ones(6, 5), "found torch.float32"),
        ("labels", torch.ones(6, 4).long(), r"found labels of shape \(6, 4\); .* or \(6,\)"),
    ],
)
def test_wrong_tensors_of_another_program_are_refused(recorded, tmp_path, name, tensor, problem):
    """It writes no checksums."""
    tensors = load_file(recorded / "00000.safetensors") | {name: tensor}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, recorded / "00000.safetensors")
    write_card(recorded, chunks=[CHUNK])
    with pytest.raises(UserError, match=problem) as error:
        write_lens_pages(recorded, tmp_path / "lens.html")
    assert "\n" not in str(error.value)


def nan_record():
    (record,) = records_of(2, 1)
    return record._replace(probs=record.probs * torch.nan)


def test_what_does_not_fit_a_trace_is_refused(trained, subject, tmp_path):
    folder = tmp_path / "trace"
    for add, problem in (
        (lambda trace: None, "nothing was added"),
        (lambda trace: trace.add([]), "found layers of .* \\[\\]; allowed"),
        (lambda trace: trace.add(records_of(2, 1), tokens=ONES[:, :2]), "found tokens of sh"),
        (lambda trace: trace.add(records_of(2, 1), words=ONES), "found words; allowed: tokens"),
        (lambda trace: trace.add(records_of(2, 1), labels=[1, 2]), "labels: found list"),
        (lambda trace: trace.add([nan_record()]), "trace: 0.probs: found nan; allowed: finite"),
        (lambda trace: trace.add([*records_of(2, 1), *records_of(3, 1)]), "of 2 and 3 items"),
        (lambda trace: trace.add([records_of(2, 1)[0].probs]), "trace: 0: found Tensor; allowed"),
    ):
        with pytest.raises(UserError, match=problem):
            with write_trace(folder, "none") as trace:
                add(trace)
    with pytest.raises(UserError, match="holds no trace; allowed: a new folder"):
        with write_trace(trained, "none"):
            pass
    with pytest.raises(UserError, match="allowed: in all batches the same"):
        with write_trace(folder, "none") as trace:
            trace.add(records_of(2, 1), labels=ONES[:, 0])
            trace.add(records_of(2, 1))
    done = CliRunner().invoke(app, ["lens", "record", str(trained)])
    assert done.exit_code == 1 and "takes --data" in done.output
