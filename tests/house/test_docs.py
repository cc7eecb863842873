"""docs/methods.md: every part that params.yaml can name has an entry, and every file it names
exists.

What the README shows works as it is written there.
"""

import re
import sys
import warnings

import pytest
import torch
from torch.nn.functional import silu

from benchmarks import layers, race, table, training_step
from benchmarks.layers import Size, prediction, step, tokens_of
from benchmarks.limit import Peaks, limit, weight_traffic
from benchmarks.peers import PEERS, Unfit, leave_group
from benchmarks.timing import Ratio, take_turns
from moecore.core.files import read_json
from moecore.nn.dispatch import Rows
from tests.project import PARAMS, ROOT, Project

METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
KIND = re.compile(r'^    kind: Literal\["(\w+)"\]', re.MULTILINE)


def kinds() -> set[str]:
    """The kinds of all parts: settings classes whose `kind` is the stem of their file."""
    found = set()
    for file in (ROOT / "moecore").rglob("*.py"):
        found |= {kind for kind in KIND.findall(file.read_text("utf-8")) if kind == file.stem}
    return found


def test_every_kind_has_an_entry():
    headed = set(re.findall(r"^### .* · `(\w+)`$", METHODS, re.MULTILINE))
    assert kinds() == headed


def test_an_entry_names_its_file_and_every_file_exists():
    for entry in METHODS.split("\n### ")[1:]:
        title = entry.splitlines()[0]
        named = re.findall(r"`((?:moecore|stages|benchmarks)/[\w/.]+)`", entry)
        assert named, f"{title}: no file"
        lost = [path for path in named if not (ROOT / path).is_file()]
        assert not lost, f"{title}: {lost}"


def test_a_kind_is_described_by_its_own_file():
    for entry in METHODS.split("\n### ")[1:]:
        title = entry.splitlines()[0]
        if kind := re.search(r"· `(\w+)`$", title):
            assert f"/{kind[1]}.py`" in entry, title


README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(language: str, word: str) -> str:
    """The one block of code in this language that has ``word``."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


def test_a_method_is_an_entry(tmp_path):
    entry = example("yaml", "moge_z").replace("methods:\n", "")
    small = re.sub(r"epochs: 2", "epochs: 1", PARAMS).replace("teacher:\n", f"{entry}teacher:\n", 1)
    project = Project(tmp_path, small.replace("[dense, vmoe, tgr]", "[dense, moge_z]"))
    assert project.moecore("check").returncode == 0
    for stage in ("prepare pretrain", "teacher_router moge_z 0", "pretrain moge_z 0"):
        project.stage(*stage.split())
    assert read_json(tmp_path / "artifacts/measured/pretrain/moge_z/0.json")["test_count"] > 0
    history = (tmp_path / "artifacts/history/pretrain/moge_z/0/history.jsonl").read_text("utf-8")
    assert all(f'"{name}"' in history for name in ("load", "group_sparsity", "z_loss"))


def test_a_trained_model_is_used(finished):
    code = example("python", "load_model").replace("28, 28", "16, 16")
    printed = finished.run([sys.executable, "-c", code]).stdout.splitlines()
    assert printed == ["torch.Size([2, 10])", "torch.Size([2, 5, 4])"]


def test_every_command_is_there():
    shown = set(re.findall(r"^moecore (\w+)", README, re.MULTILINE))
    listed = Project.at(ROOT).moecore("--help").stdout
    assert shown and all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in shown)
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)


SMALL = Size(images=2, tokens=12, width=24, hidden=48, experts=4, k=2)
PEAKS = Peaks({"float32": 1e9, "bfloat16": 2e9}, 1e9)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind():
    yield
    leave_group()


def test_ratios_by_hand():
    # Rounds: 2/1, 3/3, 6/2, 4/4, 5/4 → 1, 1, 1.25, 2, 3. Median 1.25, quartiles 1 and 2; shortest
    # turns 2 and 1.
    ratio = Ratio.of([2.0, 3, 6, 4, 5], [1.0, 3, 2, 4, 4])
    assert ratio == Ratio(median=1.25, minimum=2.0, low=1.0, high=2.0)
    with pytest.raises(ValueError):
        Ratio.of([1.0], [1.0, 2.0])


def test_contestants_take_turns():
    turns = []
    seconds = take_turns(
        {name: lambda name=name: turns.append(name) for name in "ab"}, rounds=3, warm=2
    )
    assert turns == ["a", "b"] * (len(turns) // 2) and len(turns) >= 2 * (3 + 1)
    assert [len(found) for found in seconds.values()] == [3, 3]


def test_a_slow_race_ends_early_but_not_before_two_rounds():
    assert len(take_turns({"a": lambda: None}, rounds=50, warm=1, most=0.0)["a"]) == 2


def test_flops_of_a_layer():
    # N = 24, k = 2, d = 24, h = 48, E = 4: 12·24·2·24·48 + 6·24·24·4
    assert SMALL.flops() == 12 * 24 * 2 * 24 * 48 + 6 * 24 * 24 * 4
    assert SMALL.gated == 32 and Size(1, 1, 784, 64, 400, 1).gated == 40 and SMALL.slots == 6


def test_gated_experts_by_their_definition():
    experts = layers.GatedExperts(SMALL, biased=True)
    torch.nn.init.normal_(experts.up_bias)
    rows = torch.randn(5, 24)
    offsets = torch.tensor([2, 2, 4, 5], dtype=torch.int32)
    for row, expert, found in zip(rows, [0, 0, 2, 2, 3], experts(Rows(rows, offsets)), strict=True):
        gate, up = (row @ experts.up[expert] + experts.up_bias[expert]).chunk(2)
        torch.testing.assert_close(
            found,
            (silu(gate) * up) @ experts.down[expert] + experts.down_bias[expert],
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize(
    "build", [layers.ours, layers.ours_swiglu, layers.ours_geglu, layers.ours_soft, layers.dense]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_contestants_run(build, dtype):
    layer = build(SMALL)
    assert prediction(layer(tokens_of(SMALL))).shape == (2, 12, 24)
    step(layer, SMALL, dtype)()


def test_the_dense_contestant_has_the_active_flops():
    # Two matrices d × k·h, 2 FLOPs each, forward once and backward twice.
    matrices = sum(
        parameter.numel() for parameter in layers.dense(SMALL).parameters() if parameter.ndim == 2
    )
    assert 6 * matrices * 24 == SMALL.flops() - 6 * 24 * 24 * 4


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("k", [1, 2])
def test_peers_run(peer, k):
    if peer.missing:
        pytest.skip(f"{peer.module} is not installed")
    size = SMALL._replace(k=k)
    try:
        layer = peer.build(size)
    except Unfit as reason:
        pytest.skip(str(reason))
    assert prediction(layer(tokens_of(size))).shape == (2, 12, 24)
    step(layer, size, torch.bfloat16, *race._parameters(peer))()


def test_our_gated_layer_equals_transformers():
    peer = next(peer for peer in PEERS if peer.name == "transformers grouped_mm")
    if peer.missing:
        pytest.skip("transformers is not installed")
    theirs = peer.build(SMALL)
    ours = layers.ours_swiglu(SMALL).eval()
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight.normal_())
        ours.experts.up.copy_(theirs.experts.gate_up_proj.normal_().transpose(1, 2))
        ours.experts.down.copy_(theirs.experts.down_proj.normal_().transpose(1, 2))
    tokens = tokens_of(SMALL)
    torch.testing.assert_close(prediction(ours(tokens)), theirs(tokens), atol=1e-3, rtol=1e-3)


def test_our_layer_equals_mixture_of_experts():
    peer = next(peer for peer in PEERS if peer.name == "mixture-of-experts")
    if peer.missing:
        pytest.skip("mixture-of-experts is not installed")
    theirs = peer.build(SMALL)
    ours = race.layers.MoELayer(layers._renormalised(SMALL), layers.ours(SMALL).experts).eval()
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.w_gating.t())
        ours.experts.up.copy_(theirs.experts.w1)
        ours.experts.down.copy_(theirs.experts.w2)
    tokens = tokens_of(SMALL)
    # so no token was dropped
    torch.testing.assert_close(prediction(ours(tokens)), theirs(tokens)[0], atol=1e-4, rtol=1e-3)


def test_the_race_of_a_gpu_runs_small_on_a_cpu(monkeypatch):
    monkeypatch.setattr(race, "CUDA", "cpu")
    monkeypatch.setattr(race, "ON_GPU", 2)
    monkeypatch.setattr(race, "DENSE", ((SMALL, "bfloat16", 1.1),))
    monkeypatch.setattr(torch, "compile", lambda layer: layer)
    rows = list(race.device_rows(2))
    assert [row["what"].endswith("compiled") for row in rows] == [False, True]
    assert all(row["median"] > 0 and row["rounds"] == 2 for row in rows)

    seconds = {name: [1.0] for name in (*training_step.CONTESTANTS, training_step.COMPILED)}
    monkeypatch.setattr(training_step, "race", lambda *_: seconds)
    monkeypatch.setattr(training_step, "sizes", lambda: {"small": SIZE})
    rows = list(race.step_rows(1, PEAKS, ("small",)))
    assert rows[0]["what"] == "small, compiled, 4 images/s" and len(rows) == 6

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    told = "called a synchronizing CUDA operation (Triggered internally at …)"
    monkeypatch.setattr(
        training_step.Bench, "queued", lambda self: warnings.warn(told, stacklevel=1)
    )
    monkeypatch.setattr(training_step.Bench, "step", lambda self: None)
    (row,) = race.wait_rows(("small",))
    assert row["skipped"] == "1 waits of the host"


def test_limits_by_hand():
    left = torch.ones(64, 32)
    right = torch.ones(32, 16)
    # 2·64·32·16 FLOPs = 65.5 µs at 1 GFLOP/s; 4·(2048 + 512 + 1024) bytes = 14.3 µs. The sum is
    # limited by its bytes, 4·2048·3.
    assert limit(lambda: left @ right, PEAKS) == pytest.approx(65.536e-6)
    assert limit(lambda: left + left.clone(), PEAKS) == pytest.approx(4 * 2048 * (2 + 3) / 1e9)
    assert limit(lambda: left.view(-1).unbind(), PEAKS) == 0
    assert limit(lambda: torch.mm(left, right, out=torch.empty(64, 16)), PEAKS) == pytest.approx(
        65.536e-6
    )
    assert weight_traffic([torch.empty(5, 2)]) == 3 * 5 * 2 * 4


SIZE = training_step.Size(training_step.Vit(patch=4, width=24, depth=4, heads=3), 3, 8, 5, 4, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sparse": False}, {"stock": True}, {"views": 2}], ids=str)
def test_a_training_step_changes_the_weights(dtype, options):
    made = training_step.bench(SIZE, dtype, **options)
    before = [parameter.clone() for parameter in made.model.parameters()]
    made.step()
    assert all(
        not torch.equal(old, new)
        for old, new in zip(before, made.model.parameters(), strict=True)
        if new.grad.any()
    )
    assert limit(made.step, PEAKS) > 0


def test_the_stock_layer_computes_the_same(monkeypatch):
    model = training_step.bench(SIZE, torch.float32).model.eval()
    images = torch.rand(2, 3, 8, 8)
    expected = model(images).prediction
    for place, name in (
        (training_step.block, "attend"),
        (training_step.moe.MoELayer, "forward"),
        (training_step.patch_embed.PatchEmbed, "forward"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back after the test
    training_step.go_stock()
    torch.testing.assert_close(model(images).prediction, expected, atol=1e-4, rtol=1e-4)


def test_regularized_steps_have_what_the_regularizer_needs(monkeypatch):
    monkeypatch.setattr(training_step, "sizes", lambda: {"small": SIZE})
    rows = list(race.regularizer_rows(2, "small"))
    assert [row["what"].split(",")[0] for row in rows] == [
        "group_sparsity",
        "pairwise_consistency",
        "router_kl",
    ]
    assert all(row["target"] == 1.02 and row["rounds"] == 4 for row in rows)


def test_the_table_shows_ratios_and_what_was_skipped():
    rows = [
        race.row("layer / dense MLP", "E 8", "float32", [1.0, 1.2], [1.0, 1.0], 1.2, "a note"),
        race.row("layer / DeepSpeed", "E 8", "bfloat16", [1.0, 1.0], [1.0, 1.0], 0.82),
        race.skipped("layer / st-moe-pytorch", "E 8", "bfloat16", "not installed"),
    ]
    machine = {"device_name": "cpu", "threads": 1, "peak_flops": {"float32": 1e9}, "bandwidth": 2e9}
    text = table.table(
        {"machine": machine, "versions": {"torch": "2"}, "quick": True, "rows": rows}
    )
    lines = text.splitlines()
    assert "| 1.1 (1), 2 rounds only | 1.05 – 1.15 | 1 | 1100 | 1000 |" in lines[2]
    assert "skipped: not installed" in lines[4]
    assert "1. a note" in text and "do not count" in text
    assert all(line.count("|") == lines[0].count("|") for line in lines[:5])
