"""Every measurement of the table has the four names, and its results are read back. Measurements of
a model of age on volumes, and those that do not apply to it. Models of the papers' sizes on the
meta device: what they come to, and how that is shown.
"""

import numpy as np
import pytest
import torch

from moecore.core.files import UserError, to_jsonable, write_json
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.core.source_layout import ROOT
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.views import AffineRanges, ViewSettings
from moecore.measure.base import (
    MeasuredModel,
    Skipped,
    builtin_measurements,
    find_measurement,
    read_result,
)
from moecore.measure.exploring.expert_overlays import overlay_middle_slices, parse_expert_grid
from moecore.measure.forward_cost import whole_and_routing_flops
from moecore.measure.routing import Routing
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.measure.sizes import METRICS, PaperModel, Sizes, count_sized_model, measure
from moecore.measure.sizes import build_on_meta as built_sizes
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import parameter_counts
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.predict import predict_in_batches
from moecore.report.page.report_page import render_report
from moecore.report.pictures import sizes
from moecore.report.report_files import render_report_files
from moecore.report.study_results import Results
from moecore.report.tables.metrics_by_method import compare_methods
from moecore.stages.sizes import Params
from moecore.study.params_file import dump_inline_yaml
from moecore.study.settings import extract_declared_settings
from moecore.testing import check_measurement
from moecore.training.meter import LiveBytes, live_training_tensors
from tests.measure.subjects import built
from tests.methods import METHODS, REPRESENTATIVE
from tests.project import compose_shipped

ELSEWHERE = {"cohort_checks", "word_swaps", "retrieval", "zero_shot", "truth"}  # their subjects


def test_why_something_was_skipped_is_read_back(tmp_path):
    write_json(tmp_path / "0.json", to_jsonable(Skipped(skipped="no routing")))
    found = read_result(tmp_path / "0.json", Found, "routing")
    assert found == Skipped(skipped="no routing")


def test_a_dense_model_is_skipped_where_routing_is_measured(data):
    dense = MeasuredModel(built(SingleLayer(), None, data, 1), data)
    skipped = {what for what, found in builtin_measurements().items() if found.applies(dense)}
    routed = {"routing", "invariance", "explorer"}
    routed |= {"expert_worth", "fewer_experts", "router_regret"}
    assert skipped == routed | ELSEWHERE


ROUTING = Routing.model_validate(
    {
        "images": 12,
        "overlays": 3,
        "views": {"shift": 2, "flip": True, "affine": {"degrees": 10}},
        "augmentations": ["identity", "noise", "shift", "flip", "rotation", "affine"],
        "augmentation_images": 6,
        "sweeps": {"k": [1, 2], "threshold": [], "images": 8},
    }
)


@pytest.fixture(scope="module")
def subject(aged) -> MeasuredModel:
    return aged["moe"]


@pytest.fixture(scope="module")
def found(subject) -> Found:
    return check_measurement(ROUTING, subject)


@pytest.mark.parametrize("what", ["invariance", "corruptions", "stability", "lipschitz"])
def test_measurements_of_flat_images_do_not_apply(subject, what):
    assert "volumes" in find_measurement(what).applies(subject)


def test_routing_of_volumes(found):
    assert len(found.curve("load_cv2_layer", "layer")) == 2
    rows = found.curve("match_top1_augmented", "augmentation")
    assert list(rows) == ["identity", "noise", "shift", "flip", "rotation", "affine"]
    assert rows["identity"] == 1
    # every cube of every volume has its partner
    assert 0 < found.find("match_top1").value <= 1
    assert found.facts["overlays"]["shape"] == [3, 1, 16, 16]


def test_the_sweeps_own_setting_has_the_models_error(subject, found):
    where = evenly_spaced_indices(40, 12)[evenly_spaced_indices(12, 8)]
    test = subject.data.test
    predicted = predict_in_batches(subject.model, test.images[where], 5)[0][:, 0].numpy()
    errors = np.abs(predicted - test.labels[where])
    assert found.find("score_k", k=1).value == pytest.approx(float(errors.mean()), rel=1e-5)


def test_mid_slices_by_hand():
    # One volume of 4 × 2 × 6 voxels in cubes of 2: a grid of 2 × 1 × 3; the middle row of cubes
    # along the last axis holds voxels 2 and 3.
    volume = np.zeros((1, 1, 4, 2, 6), np.float16)
    # (right, anterior) of the shown slice
    volume[0, 0, :, :, 3] = np.array([[0.0, 0.2], [0.4, 0.6], [0.8, 1.0], [0.0, 0.0]])
    layout = TokenLayout(special=1, grid=(2, 1, 3), size=(4, 2, 6))
    combine = torch.zeros(1, 7, 5)
    combine[0, 1 + 1, 4] = combine[0, 1 + 4, 2] = 1  # cubes (0, 0, 1) and (1, 0, 1) alone
    record = RoutingRecord(*[combine] * 5)
    found = overlay_middle_slices(volume, (record,), layout)
    assert found.shape == (1, 1, 2, 4) and found.experts == 5
    # anterior up, right to the right
    assert found.images()[0, 0].tolist() == [[51, 153, 255, 0], [0, 102, 204, 0]]
    assert parse_expert_grid(found.grids[0][0]).tolist() == [[4, 2]]
    special = combine.clone()
    special[0, 0] = 9  # the class token's expert is not shown
    assert overlay_middle_slices(volume, (RoutingRecord(*[special] * 5),), layout) == found


def test_noise_leaves_the_background_of_volumes():
    volumes = np.zeros((2, 1, 8, 8, 8), np.float16)
    volumes[:, :, 2:6, 2:6, 2:6] = 0.5
    views = draw_two_views(volumes, TwoViewAugmentation(name="noise", noise=0.1), 0)
    assert views.images.shape == (4, 1, 8, 8, 8) and views.affines.shape == (4, 4, 4)
    assert (views.images[:, :, 0] == 0).all() and torch.equal(views.affines[0], torch.eye(4))
    assert float(views.images[:, :, 2:6, 2:6, 2:6].std()) == pytest.approx(0.1, rel=0.2)
    assert not torch.equal(views.images[0], views.images[2]), "two views of a volume differ"
    turned = ViewSettings(affine=AffineRanges(degrees=20))
    moved = draw_two_views(volumes, TwoViewAugmentation(name="turned", views=turned), 0)
    assert not torch.equal(moved.affines[0], moved.affines[2])


def test_people_with_several_sessions_are_one_item(subject, found):
    test = subject.data.test
    names = [row["participant_id"] for row in subject.data.subjects("test")]
    assert len(test.people) == len(names) > len(set(names))
    assert len(set(zip(test.people.tolist(), names, strict=True))) == len(set(names))
    shown = test.people_at(evenly_spaced_indices(len(names), 12))
    few = shown[evenly_spaced_indices(12, 6)]
    for one in found.values:
        if one.items:
            people = few if "augmentation" in one.at else shown
            assert len(one.array) == len(set(people.tolist()))
            assert one.array.mean() == pytest.approx(one.value, abs=1e-6)


COMPOSED = compose_shipped("ours/sizes")
SMALL_VIT = {"kind": "vit", "patch": 8, "width": 32, "depth": 4, "heads": 2}
EXPERTS = {
    "router": {"kind": "noisy_top_k", "k": 2},
    "experts": {"kind": "mlp", "number": 8},
    "blocks": [1, 3],
}


@pytest.fixture(scope="module")
def paper_sizes() -> Found:
    return measure(extract_declared_settings(Params, COMPOSED.document).sizes)


def count(paper_sizes: Found, metric: str, name: str) -> float:
    return paper_sizes.find(metric, model=name).value


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_without_memory_the_counts_are_those_of_a_real_model(name):
    one = PaperModel(name=name, model=SMALL_VIT, method=METHODS[name], size=32, classes=10)
    made = built_sizes(one)
    assert all(parameter.is_meta for parameter in made.parameters())
    torch.manual_seed(0)
    real = one.model.build(made.image, one.method.moe)
    counts = count_sized_model(one)
    assert parameter_counts(real) == {
        "parameters": counts["parameters"],
        "active_parameters": counts["active_parameters"],
    }
    flops = whole_and_routing_flops(real, torch.rand(1, 3, 32, 32))
    assert counts["gflops"] == pytest.approx(flops.whole * 1e-9)
    if one.method.moe is not None:
        assert counts["routing_gflops"] == pytest.approx(flops.routing / 2 * 1e-9)


def test_the_memory_of_a_step_without_values_is_that_of_a_real_step():
    one = PaperModel(name="one", model=SMALL_VIT, size=32, classes=10, batch=3)
    real = one.model.build(built_sizes(one).image, None).train()
    optimizer = torch.optim.AdamW(real.parameters(), foreach=False)
    images = torch.rand(3, 3, 32, 32)

    def step() -> None:
        real(images).prediction.logsumexp(dim=-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with LiveBytes(live_training_tensors([real], optimizer, images)) as live:
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
    differences = sizes.size_differences(paper_sizes)
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
    differences = sizes.size_differences(paper_sizes)
    for one in paper_sizes.facts["models"]:
        numbers = differences[one["name"]].values()
        off = [abs(number["difference"]) > sizes.LIMIT for number in numbers]
        assert one["why"] or not any(off), one["name"]
        assert not one["needs"]


def test_the_readme_has_the_table_that_the_summary_prints(paper_sizes):
    text = (ROOT / "pipelines/ours/README.md").read_text(encoding="utf-8")
    for line in sizes.terminal_size_rows(sizes.size_differences(paper_sizes))[1:]:
        assert f"| {' | '.join(line)} |" in text


def test_a_study_that_trains_nothing_has_a_page_and_numbers(paper_sizes):
    results = Results({}, dump_inline_yaml(COMPOSED.document.data), {Sizes: paper_sizes})
    assert compare_methods(results) == {"sizes": sizes.size_differences(paper_sizes)}
    text = render_report(results)
    assert "Sizes of the papers&#39; models" in text and "within 1\u00a0%" in text
    assert "paper 284.90, +0.0" in text
    written = render_report_files(results, [])
    assert {"index.html", "metrics/sizes.json", "curves/training.csv"} <= set(written)
    assert any(name.startswith("plots/sizes") for name in written)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="model.heads"):
        count_sized_model(PaperModel(name="one", model=SMALL_VIT | {"heads": 3}))
