"""Pages and the code that they show; our layer and its peers in benchmarks; links and the site."""

import html
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import moecore
from benchmarks import layers, routers, training_step
from benchmarks.layers import Size, prediction, tokens_of
from benchmarks.peers import PEERS, leave_group
from moecore.core.files import read_json
from moecore.nn.backbones.vit import Vit
from moecore.training.teachers.timm import define_missing_operators
from tests.browser import LOOKS, clipped, opened
from tests.project import PARAMS, ROOT, Project

METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
KIND = re.compile(r'^    kind: Literal\["(\w+)"\]', re.MULTILINE)


def kinds() -> set[str]:
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
        named = re.findall(r"`((?:moecore|stages|benchmarks|pipelines)/[\w/.]+)`", entry)
        assert named, f"{title}: no file"
        lost = [path for path in named if not (ROOT / path).is_file()]
        assert not lost, f"{title}: {lost}"
        if kind := re.search(r"· `(\w+)`$", title):
            assert f"/{kind[1]}.py`" in entry, title


README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(language: str, word: str) -> str:
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
    done = finished.run_code(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torch.Size([2, 10])", "torch.Size([2, 5, 4])"]


def test_every_command_is_there():
    shown = set(re.findall(r"^moecore (\w+)", README, re.MULTILINE))
    listed = Project.at(ROOT).moecore("--help").stdout
    assert shown and all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in shown)
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)


SMALL = Size(images=2, tokens=12, width=24, hidden=48, experts=4, k=2)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind():
    yield
    leave_group()


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
    ours = layers.MoEFeedForward(layers._renormalised(SMALL), layers.ours(SMALL).experts).eval()
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.w_gating.t())
        ours.experts.up.copy_(theirs.experts.w1)
        ours.experts.down.copy_(theirs.experts.w2)
    tokens = tokens_of(SMALL)
    # so no token was dropped
    torch.testing.assert_close(prediction(ours(tokens)), theirs(tokens)[0], atol=1e-4, rtol=1e-3)


PRINTED = {  # of each tutorial, the words of its blocks and how what they print begins
    "own_model": {
        "MoELayer": "torch.Size([1, 32, 8])",
        "update_routers": "torch.Size([4])",
        "timm": "[0.",
    },
    "lens": {
        "transformers": "torch.Size([4, 16, 8])",
        "Gate": "torch.Size([1, 6, 4])",
        "write_trace": "torch.Size([24, 10, 4])",
        "layouts": "(7, 7)",
        "save_file": "6",
    },
}


def python_blocks(name: str) -> list[str]:
    text = (ROOT / f"docs/tutorials/{name}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


CASES = [
    (word, begins, code)
    for name, printed in PRINTED.items()
    for (word, begins), code in zip(printed.items(), python_blocks(name), strict=True)
]


@pytest.mark.parametrize(("word", "begins", "code"), CASES)
def test_an_example_runs_within_fifteen_lines(word, begins, code, capsys, tmp_path, monkeypatch):
    define_missing_operators()
    monkeypatch.chdir(tmp_path)
    if word == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert word in code
    assert len([line for line in code.splitlines() if line]) <= 15
    exec(compile(code, "tutorial.md", "exec"), {})
    assert capsys.readouterr().out.startswith(begins)


# 8 images of 4 patches and a class token; 8 experts of 24 × 24 in each of two blocks
SIZE = training_step.Size(Vit(patch=7, width=24, depth=4, heads=2), 1, 14, 3, 8, 1.0)
# FLOPs of both layers
SIX_MORE = 2 * (8 * 5) * 6 * (4 * 24 * 24)  # 40 tokens, 6 experts more, two products
MERGING = 2 * 8 * 8 * (2 * 2 * 24 * 48)  # 8 images, 8 experts, numbers of two maps
ROUNDS = 2 * 100 * 2 * (2 * 40 * 8)  # Sinkhorn's on the meta device: all 100, two products


@pytest.mark.parametrize("name", routers.CONTESTANTS)
def test_a_contestant_trains_at_the_flops_that_are_said(name):
    method = routers.CONTESTANTS[name].method(SIZE)
    made = training_step.bench(SIZE, method, torch.float32)
    made.step()
    assert all(one.isfinite().all() for one in made.model.parameters())
    own, vmoe = routers.step_flops(SIZE, method), routers.step_flops(SIZE, SIZE.vmoe)
    has_all_slots = routers.CONTESTANTS[name].note.startswith(routers.ALL_SLOTS)
    if has_all_slots or name == "competition, competing":
        own -= SIX_MORE
    if name == "merged":
        own -= MERGING
    if name == "sinkhorn":
        own -= ROUNDS
    assert own == pytest.approx(vmoe, rel=0.05)  # depth: 2 of 5 tokens are less than half


@pytest.mark.parametrize("name", routers.UPDATED)
def test_routers_are_updated_at_the_end_of_a_step_alone(name):
    method = routers.CONTESTANTS[name].method(SIZE)
    made = training_step.bench(SIZE, method, torch.float32, updates_routers=False)
    biases = [one for key, one in made.model.named_buffers() if key.endswith("balance.bias")]
    made.step()
    assert len(biases) == 2 and not any(one.any() for one in biases)
    made._replace(updates_routers=True).step()
    assert all(one.any() for one in biases)


PATTERNS = ("*.md", "docs/**/*.md", "pipelines/*.md", "pipelines/*/README.md", "benchmarks/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FROM_ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]+(?:src|href)="(?:https?:)?//')


def heading_anchors(path: Path) -> Iterator[str]:
    """The anchors of a page's headings, as code hosts and the site write them."""
    used: Counter[str] = Counter()
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for heading in HEADING.findall(text):
        words = re.sub(r"\]\([^)]*\)", "", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        yield f"{anchor}-{used[anchor]}" if used[anchor] else anchor
        used[anchor] += 1


def broken_links(page: Path) -> Iterator[str]:
    for pair in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        link = "".join(pair)
        target, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or anchor and anchor not in heading_anchors(file):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_every_link_leads_to_a_file_and_a_heading():
    assert len(PAGES) > 25
    assert [link for page in PAGES for link in broken_links(page)] == []


@pytest.mark.parametrize("text", ["[a](no.md)", "[a](README.md#no)", "[a](#no)", "[a]: no.md"])
def test_a_broken_link_is_seen(text, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(f"# Yes\n[b](#yes) `[c](no.md)`\n\n{text}\n", encoding="utf-8")
    assert len(list(broken_links(page))) == 1


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for module in ("material", "latex2mathml", "mkdocstrings"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed: `make docs` does it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_is_built_and_asks_nothing_of_others(site):
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) > len(PAGES)  # and that of errors
    assert [page.name for page, text in pages.items() if FROM_ELSEWHERE.search(text)] == []
    assert "arithmatex" not in pages[site / "docs/methods.html"]


def test_every_public_name_is_described(site):
    page = (site / "docs/api.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for name in moecore.__all__:
        assert f"moecore.{name}\n" in text or f"moecore.{name}¶" in text, name
    assert "moecore.routers.NoisyTopK" in text
    assert "attention heads; they divide the width" in text  # a setting's description


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize(
    "name", ["index", "docs/api", "docs/tutorials/first_runs", "docs/methods", "docs/claims"]
)
def test_a_page_fits_the_screen(site, browser, name, width, scheme):
    with opened(browser, site / f"{name}.html", width, scheme) as page:
        assert clipped(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_search_works_from_disk(site, browser):
    with opened(browser, site / "docs/faq.html", 1400, "light") as page:
        page.click(".md-search__input")
        page.keyboard.type("expert choice", delay=20)
        page.wait_for_selector(".md-search-result__link[href*='expert-choice']")
