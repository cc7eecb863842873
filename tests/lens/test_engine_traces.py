import base64
import json
import re
from collections import Counter
from io import BytesIO
from itertools import combinations, product

import numpy as np
import pytest
from typer.testing import CliRunner

from moecore.core.files import UserError
from moecore.lens import engine_traces as module
from moecore.pipeline.cli import app

LAYERS, K, EXPERTS = 3, 2, 8
FLAT = module.EngineFacts(top_k=K, layers=LAYERS)
START = "0,1\n0,2\n1,0\n"  # of two layers with k = 2, three of four lines
IDS = [[[0, 1], [2, 3]], [[1, 2], [0, 3]]]  # two tokens, two layers


def draw_requests(number: int = 6, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids (T, L, k) of prompts and of generated tokens; lower experts are likelier in prompts."""
    generator = np.random.default_rng(seed)
    requests = []
    for _ in range(number):
        parts = []
        for tokens, slope in ((generator.integers(3, 9), 0.6), (generator.integers(2, 12), 0.1)):
            noise = generator.gumbel(size=(tokens, LAYERS, EXPERTS))
            parts.append((-noise + slope * np.arange(EXPERTS)).argsort(axis=-1)[..., :K])
        requests.append(tuple(parts))
    return requests


def encoded_npy(ids: np.ndarray) -> str:
    buffer = BytesIO()
    np.save(buffer, ids.astype(np.uint8))
    return base64.b64encode(buffer.getvalue()).decode()


def encoded_flat(ids: np.ndarray, dtype: str = "int32") -> str:
    return base64.b64encode(ids.astype(dtype).tobytes()).decode()


def usage_of(prompt, generated):
    """Numbers of tokens: the last generated token is never routed."""
    return {"prompt_tokens": len(prompt), "completion_tokens": len(generated) + 1}


def old_vllm(prompt, generated):
    choices = [{"routed_experts": generated.tolist()}]
    return {"prompt_routed_experts": prompt.tolist(), "choices": choices}


def new_vllm(prompt, generated):
    both = np.concatenate([prompt, generated])
    choices = [{"routed_experts": encoded_npy(both)}]
    return {"usage": usage_of(prompt, generated), "choices": choices}


def sglang(prompt, generated, first=0):
    flat = encoded_flat(np.concatenate([prompt, generated])[first:])
    return {"text": "", "meta_info": {**usage_of(prompt, generated), "routed_experts": flat}}


def chat_sglang(prompt, generated):
    both = np.concatenate([prompt, generated])
    extra = {"routed_experts": encoded_flat(both, "uint8"), "routed_experts_dtype": "uint8"}
    return {"usage": usage_of(prompt, generated), "choices": [{"index": 0, "sgl_ext": extra}]}


def llama_lines(prompt, generated) -> str:
    """Passes of up to four tokens of the prompt, then of one generated token each."""
    passes = [prompt[:2], prompt[2:]] if len(prompt) != 3 else [prompt]
    lines = []
    for part in (*passes, *generated[:, None]):
        for layer in range(LAYERS):
            lines += [f"{layer + 4},{expert}\n" for expert in part[:, layer].ravel()]
    return "".join(lines)


@pytest.fixture
def files(tmp_path):
    requests = draw_requests()
    found = {}
    for write in (old_vllm, new_vllm, sglang, chat_sglang):
        path = tmp_path / f"{write.__name__}.json"
        path.write_text(json.dumps([write(*request) for request in requests]))
        found[write.__name__] = [path]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(old_vllm(*request)) + "\n" for request in requests))
    found["llama"] = [tmp_path / f"{number}.csv" for number in range(len(requests))]
    for path, request in zip(found["llama"], requests, strict=True):
        path.write_text(llama_lines(*request))
    return found | {"lines": [lines]}


@pytest.mark.parametrize("name", "old_vllm new_vllm sglang chat_sglang lines llama".split())
def test_ids_and_phases_are_those_that_were_written(files, name):
    read = module.read_engine_files(files[name], FLAT)
    for request, (prompt, generated) in zip(read, draw_requests(), strict=True):
        assert np.array_equal(request.ids, np.concatenate([prompt, generated]))
        assert request.prompt == len(prompt)


def test_first_layers_cached_tokens_and_later_starts_are_left_out(tmp_path):
    (prompt, generated), *_ = draw_requests(1)
    prompt[:2] = -1
    first = {"routed_experts": np.zeros_like(generated).tolist()}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(old_vllm(prompt, generated)))
    (request,) = module.read_engine_files([path], module.EngineFacts(first_layer=1))
    assert request.ids.shape[1] == LAYERS - 1 and (request.ids[:2] == -1).all()
    said = r"json:1: .*token \d+, layer 0: found expert 0 in \[0, 0\]"
    with pytest.raises(UserError, match=said):
        path.write_text(json.dumps({"choices": [first]}))
        module.read_engine_files([path], module.EngineFacts())
    path.write_text(json.dumps(sglang(prompt[2:], generated, first=1)))
    (request,) = module.read_engine_files([path], FLAT)
    assert request.prompt == len(prompt) - 3


def test_caches_by_hand():
    # Two slots. LRU: of 1 2 1 3 2 1, the second 1 hits; 3 replaces 2, 2 replaces 1, 1 replaces 3.
    # Belady: 3 replaces 1 or 2, of which the other hits later. LFU: 3 replaces 2, used once; 2
    # replaces 3, used once and older; 1 hits. Static: the other request used 1 and 3 most.
    uses = [np.array([1, 2, 1, 3]), np.array([2, 1])]
    assert module.simulate_cache(uses, 2, "lru").tolist() == [1, 0]
    assert module.simulate_cache(uses, 2, "belady").tolist() == [1, 1]
    assert module.simulate_cache(uses, 2, "lfu").tolist() == [1, 1]
    assert module.simulate_cache([*uses, np.array([3, 3, 1])], 2, "static").tolist() == [3, 1, 1]


def most_hits(uses, size, cached=frozenset()):
    """Hits of the best of all possible replacements, tried one by one."""
    if not uses:
        return 0
    first, *others = uses
    if first in cached:
        return 1 + most_hits(others, size, cached)
    left = combinations(cached, min(len(cached), size - 1))
    return max(most_hits(others, size, frozenset({first, *some})) for some in left)


def test_caches_against_slow_references():
    generator = np.random.default_rng(0)
    for size, _ in product((1, 2, 3), range(20)):
        uses = generator.integers(0, 5, 9).tolist()
        request = [np.array(uses)]
        assert module.simulate_cache(request, size, "belady").sum() == most_hits(uses, size)
        recent = 0
        for time, expert in enumerate(uses):
            before = uses[:time]
            if expert in before:
                recent += len({*uses[time - before[::-1].index(expert) : time]}) < size
        assert module.simulate_cache(request, size, "lru").sum() == recent
        assert module.simulate_cache(request, size, "lfu").sum() <= most_hits(uses, size)


def test_quantities_against_slow_references(files):
    rows = module.analyse_engines(files["old_vllm"], files["llama"], FLAT._replace(experts=EXPERTS))
    found = {(row["layer"], row["quantity"]): row for row in rows}
    requests = [np.concatenate(request) for request in draw_requests()]
    for layer in range(LAYERS):
        tokens = [set(token) for request in requests for token in request[:, layer].tolist()]
        load = np.array([sum(e in token for token in tokens) for e in range(EXPERTS)])
        pairs = Counter(pair for token in tokens for pair in combinations(sorted(token), 2))
        lifts = [count * count * len(tokens) / load[a] / load[b] for (a, b), count in pairs.items()]
        chosen = np.concatenate([p[:, layer].ravel() for p, _ in draw_requests()])
        prompts = np.bincount(chosen, minlength=EXPERTS)
        shares = [part / part.sum() for part in (prompts, load - prompts)]
        expected = {
            "load_cv2": load.var() / load.mean() ** 2,
            "busiest_share": load.max() / load.sum(),
            "pair_lift": sum(lifts) / sum(pairs.values()),
            "phase_distance": np.abs(shares[0] - shares[1]).sum() / 2,
            "experts_of_8_tokens": sum(1 - (1 - load / len(tokens)) ** 8),
            "agreement": 1,
        }
        for name, value in expected.items():
            row = found[layer, name]
            assert row["value"] == pytest.approx(value), name
            assert row["low"] is None or row["low"] < value < row["high"]
        share = (load / load.sum()) @ (load / len(tokens))
        assert found[layer, "agreement"]["chance"] == pytest.approx(share)
    mean = np.mean([found[layer, "load_cv2"]["value"] for layer in range(LAYERS)])
    assert found["mean", "load_cv2"]["value"] == pytest.approx(mean)


def test_of_random_routing_nothing_is_beyond_chance(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        ids = generator.random((40, 30, 1, EXPERTS)).argsort(axis=-1)[..., :K]
        requests = [old_vllm(one[:10], one[10:]) for one in ids]
        (tmp_path / f"{name}.json").write_text(json.dumps(requests))
    paths = ([tmp_path / f"{name}.json"] for name in ("a", "b"))
    for row in module.analyse_engines(*paths, module.EngineFacts()):
        name, chance = row["quantity"], row["chance"]
        if "belady" in name or "hits_lfu" in name or "lru" in name:
            continue  # a token has two different experts: fewer hits than independent uses
        width = (row["high"] or chance) - (row["low"] or chance)
        assert row["value"] == pytest.approx(chance, abs=max(0.03, 2 * width)), name


def test_the_command_prints_and_writes(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["lens", "engine", "sglang.json", "--top-k", "2", "--layers", "3"]
    done = CliRunner().invoke(app, [*words, "--against", "old_vllm.json"])
    assert done.exit_code == 0 and "agreement                1; by chance" in done.output
    rows = json.loads((tmp_path / "engine.json").read_text())
    assert {row["layer"] for row in rows} == {0, 1, 2, "mean"}
    done = CliRunner().invoke(app, [*words, "--first-layer", "1", "--out", "engine.csv"])
    assert done.output.endswith("engine.csv, engine.html: written\n"), done.output
    table = (tmp_path / "engine.csv").read_text(encoding="utf-8").splitlines()
    assert table[0] == "layer,quantity,value,low,high,chance" and table[1].startswith("1,load_cv2,")
    page = (tmp_path / "engine.html").read_text(encoding="utf-8")
    assert "What the routers of sglang.json do" in page and "Hits belady 4" in page
    assert re.findall(r"Layer \d", page) == ["Layer 1", "Layer 2"]


def response(ids, **others):
    return json.dumps({"choices": [{"routed_experts": ids}], **others})


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", None, "No such file"),
        ("a.txt", "", "found suffix '.txt'; allowed: .json"),
        ("a.json", b"\xff\xfe", "invalid start byte"),
        ("a.json", response(IDS)[:-3], "json:1: found .*; allowed: JSON"),
        ("a.jsonl", response(IDS) + "\n\n{", "jsonl:2: found .*; allowed: JSON"),
        ("a.json", "[]", "found no request"),
        ("a.json", "[3]", "response 0: found no choices and"),
        ("a.json", '{"choices": []}', "response 0: found no choices and"),
        ("a.json", '{"choices": [[1]]}', "response 0: found no choices and"),
        ("a.json", '{"choices": [{}], "usage": 3}', "usage that is no object"),
        ("a.json", response(None), "choice 0: routed_experts: found object of shape"),
        ("a.json", response([]), r"routed_experts: found float64 of shape \(0,\)"),
        ("a.json", response([[0, 1]]), r"found int64 of shape \(1, 2\)"),
        ("a.json", response([IDS[0], [[1, 2]]]), "routed_experts: found .*inhomogeneous"),
        ("a.json", response([[[0.5, 1.0]]]), "found float64 of shape"),
        ("a.json", response([[["a", "b"]]]), "found <U1 of shape"),
        ("a.json", response([[[0, 9]]]), r"token 0, layer 0: found expert 9 in \[0, 9\]; .* to 7"),
        ("a.json", response([[[0, -2]]]), "token 0, layer 0: found expert -2"),
        ("a.json", response([[[0, -1]]]), "token 0, layer 0: found expert -1"),
        ("a.json", response([*IDS, [[4, 4], [0, 1]]]), "token 2, layer 0: found expert 4 in"),
        ("a.json", response([[[-1, -1]]]), "highest id -1; allowed: recorded ids"),
        ("a.json", f"[{response(IDS)}, {response([[[0, 1]]])}]", r"response 1.* \(1, 1, 2\)"),
        ("a.json", response(IDS, prompt_routed_experts=[[[0, 1]]]), "choice 0: routed_exp"),
        ("a.json", response(IDS, usage=usage_of("abc", "d" * 9)), "found 2 tokens; .*: 9 to 12"),
        ("a.json", response("%%%"), "found Only base64 data"),
        ("a.json", response(encoded_npy(np.array(IDS))[:-8]), "routed_experts: found "),
        ("a.json", response(encoded_flat(np.arange(8))[:-4]), "found .*; allowed: .tokens"),
        ("a.json", response(encoded_flat(np.arange(9))), "cannot reshape"),
        ("a.csv", "", "whole lines layer,expert"),
        ("a.csv", "layer,expert\n0,1\n", r"csv:1: found 'layer,expert'; allowed: layer,expert"),
        ("a.csv", f"{START}1\n", "csv:4: found '1'"),
        ("a.csv", f"{START}1,", "csv:4: found '1,'"),
        ("a.csv", f"{START}1,1", "whole lines layer,expert"),
        ("a.csv", f"{START}1,-1\n", "csv:4: found '1,-1'"),
        ("a.csv", f"{START}1,1\n0,1\n0,2\n", r"csv:5: found \[2, 0\] lines of layers \[0, 1\]"),
        (
            "a.csv",
            "0,1\n0,2\n0,3\n1,0\n1,1\n1,2\n",
            r"csv:1: found \[3, 3\] lines .* multiple of k",
        ),
        ("a.csv", "0,1\n0,1\n1,0\n1,1\n", r"csv: token 0, layer 0: found expert 1 in \[1, 1\]"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path, name, text, problem):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=problem) as error:
        module.read_engine_files([path], module.EngineFacts(top_k=2, layers=2, experts=8))
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_what_files_do_not_say_and_other_requests_are_refused(files, tmp_path):
    for name in ("sglang", "llama"):
        with pytest.raises(UserError, match="with (--layers and )?--top-k"):
            module.read_engine_files(files[name], module.EngineFacts())
    with pytest.raises(UserError, match=r"0.csv: \(tokens, layers, k\) of requests: found \[\("):
        module.analyse_engines(files["old_vllm"], files["llama"][:2], FLAT)
