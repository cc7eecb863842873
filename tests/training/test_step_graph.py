"""Steps replayed as a graph. ``CudaStepCapturer`` is replaced: a replay runs the step again."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.torch_internals import TorchDispatchMode
from moecore.training import loop, runtime, step_graph
from moecore.training.artifacts import Checkpoint
from moecore.training.method import Method
from moecore.training.monitor import MonitorSettings
from moecore.training.regularizers.base import Regularizer
from moecore.training.settings import Training
from moecore.training.step_graph import GraphedStepRunner
from tests.methods import METHODS
from tests.training import small
from tests.training.small import COMPETITION, CPU, MLPS, SETTINGS, VMOE, made

BIASED = {"kind": "noisy_top_k", "balance": {"kind": "loss_free", "rate": 0.01, "until": 0.6}}
FROZEN = {"kind": "frozen_copy", "until": 0.5, "router": {"kind": "noisy_top_k"}}
CAPTURED = {name: METHODS[name] for name in ("dense", "prc", "tgr", "ermoe", "hash_moe")}
CAPTURED |= {"bias": Method(router=BIASED, experts=MLPS)}
CAPTURED |= {"frozen": Method(router=FROZEN, experts=MLPS)}
FIRST = ["eager", "eager", "watched", "captured", "eager", "replayed", "eager", "replayed"]


class Reads(TorchDispatchMode):
    number = 0  # of times that the host read a tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class FakeGraphs:
    rate_dtype = torch.float64
    error = 0.0  # that replays add to a weight

    def run_eagerly(self, step):
        self.calls.append("eager")
        return step()

    def describe_memory_shortage(self):
        return ""

    def run_and_find_graph_obstacle(self, step):
        self.calls.append("watched")
        with Reads() as reads:
            output = step()
        return output, "the host waits" if reads.number > 99 else ""  # the CPU's kernels read too

    def capture(self, step, optimizer):
        self.calls.append("captured")

        def replay():
            output = step()
            optimizer.param_groups[0]["params"][0].data.add_(self.error)
            return output

        return replay


class Recorder(GraphedStepRunner):
    def _replay(self, inputs):
        self.graphs.calls.append("replayed")
        output = super()._replay(inputs)
        fixed = [*self.static.batch, self.static.rate, *self.job.learners.state_dict().values()]
        self.places.add(tuple(value.data_ptr() for value in fixed if isinstance(value, Tensor)))
        return output


@pytest.fixture
def fake(monkeypatch):
    FakeGraphs.calls, Recorder.places = [], set()
    monkeypatch.setattr(step_graph, "CudaStepCapturer", FakeGraphs)
    monkeypatch.setattr(loop, "GraphedStepRunner", Recorder)
    return FakeGraphs


def trained(job, policy, settings=SETTINGS, checkpoint=None, points=None):
    asked = CPU._replace(graph=policy)
    run = loop.iterate_training(
        job, settings, 0, asked, checkpoint, monitor=MonitorSettings(every=2)
    )
    return small.logged_points(islice(run, points))


def assert_equal_to_eager(method, policy="required"):
    ours, plain = made(method), made(method)
    assert trained(ours, policy) == trained(plain, "off")
    small.assert_same_weights(ours, plain)


@pytest.mark.parametrize("name", CAPTURED)
def test_replays_compute_the_bits_of_eager_steps_in_the_same_tensors(name, fake):
    assert_equal_to_eager(CAPTURED[name])
    captures = 1 + (name in ("bias", "frozen"))  # the host decides otherwise from ``until`` on
    assert fake.calls[:8] == FIRST and fake.calls.count("captured") == captures
    assert 1 <= len(Recorder.places) <= captures


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_validated_and_resumed_it_ends_with_the_same_bits(optimizer, fake, tmp_path):
    changes = {"epochs": 4, "optimizer": {"kind": optimizer}, "adversarial": {"steps": 1}}
    settings = Training.model_validate(SETTINGS.model_dump(exclude={"weight_decay"}) | changes)
    plain, resumed = made(VMOE), made(VMOE)
    expected = trained(plain, "off", settings)
    checkpoint = Checkpoint(tmp_path)  # of step 9; validated at steps 6 and 12
    trained(made(VMOE), "required", settings, checkpoint, points=4)
    assert trained(resumed, "required", settings, checkpoint) == expected[3:]
    small.assert_same_weights(resumed, plain)
    assert fake.calls.count("captured") == 2 and fake.calls.count("replayed") == 8 + 11


class Foreign(Regularizer):
    kind: str = "foreign"

    def __call__(self, step):
        assert all(step.output.prediction.sum().item() < 1e9 for _ in range(100))
        return step.output.prediction.sum() * 0


OURS = type("HostRead", (Foreign,), {"__module__": "moecore.training.regularizers.host_read"})
REFUSED = {
    "the host waits": VMOE.model_copy(update={"regularizers": (OURS(),)}),
    "Foreign, not of moecore": VMOE.model_copy(update={"regularizers": (Foreign(),)}),
    "the sigma of group_sparsity": METHODS["moge"],
    "which layers compete": Method(router=COMPETITION, experts=MLPS),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_graph_would_not_repeat_is_said_once_and_runs_eagerly(reason, fake, capsys):
    assert_equal_to_eager(REFUSED[reason], "tried")
    told = capsys.readouterr().err
    assert "captured" not in fake.calls and told.count(reason) == told.count("\n") == 1
    with pytest.raises(UserError, match=f"MOECORE_GRAPH.*{reason}.*allowed: false"):
        trained(made(REFUSED[reason]), "required")


def test_a_first_replay_that_differs_is_undone(fake, capsys, monkeypatch):
    monkeypatch.setattr(fake, "error", 0.1)
    assert_equal_to_eager(VMOE, "tried")
    assert "its first replay differs in the update by" in capsys.readouterr().err


def test_what_the_environment_asks_for(monkeypatch):
    assert runtime.graph_policy("cuda") == "off"  # until a card has shown what it gains
    monkeypatch.setenv(runtime.GRAPH_ENV, "auto")
    assert (runtime.graph_policy("cuda"), runtime.graph_policy("cpu")) == ("tried", "off")
    monkeypatch.setenv(runtime.GRAPH_ENV, "true")
    with pytest.raises(UserError, match="MOECORE_GRAPH: found 'true' on cpu; allowed: auto"):
        runtime.tune_runtime("cpu")
    with pytest.raises(UserError, match="precision: found bfloat16, which T4 does not compute"):
        CPU._replace(device="cuda", device_name="T4").dtype("bfloat16")
