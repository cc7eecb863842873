"""The package of the question ours/sizes: what its models come to, and how that is shown."""

import pytest
import torch
from paper_models import pictures
from paper_models.sizes import METRICS, PaperModel, Sizes, build_on_meta, count_sized_model

from moecore.core.config import Surroundings
from moecore.core.files import UserError
from moecore.core.source_layout import ROOT, allowing_packages
from moecore.measure.cost import whole_and_routing_flops
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import count_total_and_active_parameters
from moecore.report.page.report_page import render_report
from moecore.report.report_files import render_report_files
from moecore.report.result_types import StudyResults
from moecore.report.tables.metrics_by_method import compare_methods
from moecore.study.params_writer import dump_inline_yaml
from moecore.testing import check_calculation
from moecore.training.meter import LiveBytesCounter, live_training_tensors
from tests.methods import METHODS, REPRESENTATIVE
from tests.project import compose_shipped

COMPOSED = compose_shipped("ours/sizes")
SMALL_VIT = {"kind": "vit", "patch": 8, "width": 32, "depth": 4, "heads": 2}
EXPERTS = {
    "router": {"kind": "noisy_top_k", "k": 2},
    "experts": {"kind": "mlp", "number": 8},
    "blocks": [1, 3],
}


@pytest.fixture(scope="module")
def paper_sizes() -> Found:
    return check_calculation(Sizes.model_validate(COMPOSED.document.data["paper_models"]["sizes"]))


def count(paper_sizes: Found, metric: str, name: str) -> float:
    return paper_sizes.find(metric, model=name).value


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_without_memory_the_counts_are_those_of_a_real_model(name):
    one = PaperModel(name=name, model=SMALL_VIT, method=METHODS[name], size=32, classes=10)
    made = build_on_meta(one)
    assert all(parameter.is_meta for parameter in made.parameters())
    torch.manual_seed(0)
    real = one.model.build(made.image, one.method.moe)
    counts = count_sized_model(one)
    assert count_total_and_active_parameters(real) == {
        "parameters": counts["parameters"],
        "active_parameters": counts["active_parameters"],
    }
    flops = whole_and_routing_flops(real, torch.rand(1, 3, 32, 32))
    assert counts["gflops"] == pytest.approx(flops.total * 1e-9)
    if one.method.moe is not None:
        assert counts["routing_gflops"] == pytest.approx(flops.routing / 2 * 1e-9)


def test_the_memory_of_a_step_without_values_is_that_of_a_real_step():
    one = PaperModel(name="one", model=SMALL_VIT, size=32, classes=10, batch=3)
    real = one.model.build(build_on_meta(one).image, None).train()
    optimizer = torch.optim.AdamW(real.parameters(), foreach=False)
    images = torch.rand(3, 3, 32, 32)

    def step() -> None:
        real(images).prediction.logsumexp(dim=-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with LiveBytesCounter(live_training_tensors([real], optimizer, images)) as live:
        step()
    counts = count_sized_model(one)
    assert counts["training_memory_mb"] == live.peak * 1e-6 and set(counts) < set(METRICS)


def test_a_teachers_routers_are_counted_but_not_active():
    alone, guided = (
        count_sized_model(
            PaperModel(name="one", model=SMALL_VIT, method=EXPERTS, size=32, teacher_width=width)
        )
        for width in (0, 48)
    )
    assert guided["parameters"] - alone["parameters"] == 2 * 8 * 48  # layers · experts · width
    assert guided["active_parameters"] == alone["active_parameters"]


def test_the_papers_sizes_come_out(paper_sizes):
    differences = pictures.size_differences(paper_sizes)
    # adversarial-moe, table 1, and TGR, table S9: all parameters
    others = ("ERMoE", "Swin", "MoE")
    built_here = [name for name in differences if not name.startswith(others)]
    assert len(built_here) == 14
    # MoGE: "approximately 1.4B", and 31 further experts in each of two layers beside two routers
    assert count(paper_sizes, "parameters", "SwinV1-MoE-B, 128 experts") == 1_420_631_712
    names = ("SwinV2-MoE-T, 32 experts", "Swin-T")
    sparse, dense = (count(paper_sizes, "parameters", name) for name in names)
    more = 31 * (1_181_568 + 4_722_432) + 32 * (384 + 768)
    assert abs(sparse - dense - more) < 100
    for one in built_here:
        assert abs(differences[one]["parameters"]["difference"]) < 0.006, one
    # with the layer before the head that the authors' ViT has
    dense = count(paper_sizes, "parameters", "ViT-B/32") + 768 * 768 + 768
    assert round(dense / 1e6, 1) == 102.1
    # ERMoE's rank is not printed: half the width gives parameters and routing
    half = differences["ERMoE-B/16, rank 384"]
    assert abs(half["parameters"]["difference"]) < 0.003
    assert abs(half["routing_gflops"]["difference"]) < 0.003


def test_what_eigenbases_add_to_the_memory_of_a_step(paper_sizes):
    # supplement §12: 20.5 / 18.0 with 8 experts, 84.7 / 80.0 with 32; the batch is not printed
    added = {}
    for number in (8, 32):
        names = (f"{kind}, one layer, {number} experts" for kind in ("ERMoE", "MoE"))
        ours, plain = (count(paper_sizes, "training_memory_mb", name) for name in names)
        added[number] = ours / plain
    assert added == pytest.approx({8: 1.14, 32: 2.24}, abs=0.005)


def test_the_rank_that_gives_the_printed_parameters(paper_sizes):
    # parameters are linear in the rank
    names = (f"ERMoE-B/16, rank {rank}" for rank in (384, 512))
    low, high = (count(paper_sizes, "parameters", name) for name in names)
    rank = 384 + (243.0e6 - low) * (512 - 384) / (high - low)
    assert rank == pytest.approx(387, abs=0.5)


def test_every_number_that_is_off_has_a_word(paper_sizes):
    differences = pictures.size_differences(paper_sizes)
    for one in paper_sizes.facts["models"]:
        numbers = differences[one["name"]].values()
        off = [abs(number["difference"]) > pictures.LIMIT for number in numbers]
        assert one["why"] or not any(off), one["name"]
        assert not one["needs"]


def test_the_readme_has_the_table(paper_sizes):
    text = (ROOT / "pipelines/ours/README.md").read_text(encoding="utf-8")
    for line in pictures.readme_size_rows(paper_sizes)[1:]:
        assert f"| {' | '.join(line)} |" in text


def test_a_study_that_trains_nothing_has_a_page_and_numbers(paper_sizes):
    settings = dump_inline_yaml(COMPOSED.document.data)
    with allowing_packages(["paper_models"]):
        results = StudyResults({}, settings, {"paper_models.sizes": paper_sizes})
        compared = compare_methods(results)["calculations"]["paper_models.sizes"]
        text = render_report(results)
        written = render_report_files(results, [])
    assert len(compared) == len(paper_sizes.values)
    dense = compared["parameters_ViT_B_32"]
    assert dense == {"mean": count(paper_sizes, "parameters", "ViT-B/32"), "seeds": 1} | {
        "form": "count"
    }
    assert "Sizes of the papers&#39; models" in text and "within 1\u00a0%" in text
    assert "paper 284.90, +0.0" in text
    assert {"index.html", "metrics/calculations/paper_models.sizes.json"} <= set(written)
    assert "plots/paper_models.sizes_difference_from_the_papers.svg" in written


def test_what_does_not_fit_is_refused():
    wide = SMALL_VIT | {"heads": 3}
    method = EXPERTS | {"router": {"kind": "noisy_top_k", "k": 9}}
    models = [{"name": "a", "reported": "word", "needs": "much"}, {"name": "b", "model": wide}]
    models.append({"name": "c", "model": SMALL_VIT, "method": method})
    misfits = dict(Sizes(models=models).misfits(Surroundings()))
    assert list(misfits) == [
        ("models", 0, "reported"),
        ("models", 1, "model", "heads"),
        ("models", 2, "method", "router", "k"),
    ]
    with pytest.raises(UserError, match="model.heads"):
        count_sized_model(PaperModel(name="one", model=SMALL_VIT | {"heads": 3}))
