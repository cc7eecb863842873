"""Models of the papers' sizes on the meta device: what they come to, and how that is shown."""

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.measure.costs.passes import flops_per_image
from moecore.measure.sizes import Result, Row, Sized, Sizes, built, counted, measure
from moecore.nn.backbones.model import parameter_counts
from moecore.report.measured import Results
from moecore.report.measures import sizes
from moecore.report.page import page
from moecore.report.tables import flat
from moecore.report.texts import texts
from moecore.study.params import read
from moecore.study.selection import Selection
from stages.sizes import Params
from tests.nn.test_every_method import METHODS

STUDY = ROOT / "pipelines/sizes"
SMALL = {"kind": "vit", "patch": 8, "width": 32, "depth": 4, "heads": 2}
EXPERTS = {
    "router": {"kind": "noisy_top_k", "k": 2},
    "experts": {"kind": "mlp", "number": 8},
    "blocks": [1, 3],
}


@pytest.fixture(scope="module")
def found() -> Result:
    return measure(read(Params, str(STUDY / "params.yaml")).sizes)


def row(found: Result, name: str) -> Row:
    (one,) = [row for row in found.rows if row.name == name]
    return one


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if not m.routed_by_teacher])
def test_without_memory_the_counts_are_those_of_a_real_model(name):
    one = Sized(name=name, model=SMALL, method=METHODS[name], size=32, classes=10)
    made = built(one)
    assert all(parameter.is_meta for parameter in made.parameters())
    torch.manual_seed(0)
    real = one.model.build(made.image, one.method.moe)
    counts = counted(one)
    assert parameter_counts(real) == {
        "parameters": counts.parameters,
        "active_parameters": counts.active_parameters,
    }
    flops = flops_per_image(real, torch.rand(1, 3, 32, 32))
    assert counts.flops_per_image == pytest.approx(flops.whole)
    if one.method.moe is not None:
        assert counts.routing_flops_per_layer == pytest.approx(flops.routing / 2)


def test_a_teachers_routers_are_counted_but_not_active():
    alone, guided = (
        counted(Sized(name="one", model=SMALL, method=EXPERTS, size=32, teacher_width=width))
        for width in (0, 48)
    )
    assert guided.parameters - alone.parameters == 2 * 8 * 48  # layers · experts · width
    assert guided.active_parameters == alone.active_parameters


def test_the_papers_sizes_come_out(found):
    differences = sizes.flat(found)
    # adversarial-moe, table 1, and TGR, table S9: all parameters
    built_here = [row for row in found.rows if not row.name.startswith(("ERMoE", "Swin"))]
    assert len(built_here) == 14
    # MoGE: "approximately 1.4B", and 31 further experts in each of two layers beside two routers
    assert row(found, "SwinV1-MoE-B, 128 experts").parameters == 1_420_631_712
    sparse, dense = (row(found, name) for name in ("SwinV2-MoE-T, 32 experts", "Swin-T"))
    more = 31 * (1_181_568 + 4_722_432) + 32 * (384 + 768)
    assert abs(sparse.parameters - dense.parameters - more) < 100
    for one in built_here:
        assert abs(differences[one.name]["parameters"]["difference"]) < 0.006, one.name
    # with the layer before the head that the authors' ViT has
    dense = row(found, "ViT-B/32").parameters + 768 * 768 + 768
    assert round(dense / 1e6, 1) == 102.1
    # ERMoE's rank is not printed: half the width gives parameters and routing
    half = differences["ERMoE-B/16, rank 384"]
    assert abs(half["parameters"]["difference"]) < 0.003
    assert abs(half["routing_gflops"]["difference"]) < 0.003


def test_the_rank_that_gives_the_printed_parameters(found):
    # parameters are linear in the rank
    low, high = (row(found, f"ERMoE-B/16, rank {rank}").parameters for rank in (384, 512))
    rank = 384 + (243.0e6 - low) * (512 - 384) / (high - low)
    assert rank == pytest.approx(387, abs=0.5)


def test_every_number_that_is_off_has_a_word(found):
    for one in found.rows:
        off = [
            abs(number["difference"]) > sizes.LIMIT
            for number in sizes.flat(Result(rows=(one,)))[one.name].values()
        ]
        assert one.why or not any(off), one.name
    assert not any(one.needs for one in found.rows)


def test_the_readme_has_the_table_that_the_summary_prints(found):
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    for line in sizes.table(sizes.flat(found))[1:]:
        assert f"| {' | '.join(line)} |" in text


def test_a_study_that_trains_nothing_has_a_page_and_numbers(found):
    results = Results({}, (STUDY / "params.yaml").read_text(encoding="utf-8"), {Result: found})
    assert flat(results) == {"sizes": sizes.flat(found)}
    text = page(results)
    assert "Sizes of the papers&#39; models" in text and "within 1 %" in text
    assert "paper 284.90, +0.0" in text
    written = texts(results, [])
    assert {"index.html", "metrics/sizes.json", "curves/training.csv"} <= set(written)
    assert any(name.startswith("plots/sizes") for name in written)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValidationError, match="both of `model` and `needs`"):
        Sized(name="one")
    with pytest.raises(ValidationError, match="models has one twice"):
        Sizes(models=[{"name": "one", "needs": "time"}] * 2)
    with pytest.raises(UserError, match="model.heads"):
        counted(Sized(name="one", model=SMALL | {"heads": 3}))
    with pytest.raises(ValueError, match="nobody is not in"):
        sizes.flat(Result(rows=(Row(name="one", reported="nobody", parameters=1),)))


def test_a_run_names_methods_seeds_and_phases_or_none_of_them():
    assert Selection(methods=(), seeds=(), phases=()).methods == ()
    with pytest.raises(ValidationError, match="methods is empty; allowed: at least one each"):
        Selection(methods=(), seeds=(0,))
