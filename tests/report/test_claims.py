"""Claims: paired by seed, evaluated by Student's interval, and never silently about something
that is not there.

The cross-table as Markdown: its columns are those that any method has, its cells means, a
dash where a method has none.
"""

import math

import pytest

from moecore.core.files import UserError
from moecore.measure.base import Estimate
from moecore.report.claims import evaluate, flat_claims, verdict
from moecore.report.cross_table import cross_table
from moecore.report.measured import Measured, Phase, Results, measured
from moecore.report.page import page
from moecore.report.summary import claim_lines, rows
from moecore.report.tables import flat
from moecore.report.verdicts import claims_markdown
from moecore.statistics.intervals import Interval
from moecore.study.selection import Claim
from tests.report.generated import TASK, card, records_of, routed_by, trained
from tests.report.test_report import assert_self_contained, results

ROUTED = routed_by(records_of(0), 0, 0)


def model(method: int, match: float | None, accuracy: float = 0.5) -> Measured:
    """A trained model, with its routing where it has any."""
    score = Estimate(value=accuracy, low=accuracy - 0.1, high=accuracy + 0.1)
    outcome = trained(method, 0, False, "pretrain").model_copy(update={"test_score": score})
    if match is None:
        return measured(outcome)
    return measured(outcome, ROUTED.model_copy(update={"match_top1": match}))


def study(**methods: list) -> Results:
    """Methods with their match ratio of each seed."""
    models = {
        name: {seed: model(number, value) for seed, value in enumerate(values)}
        for number, (name, values) in enumerate(methods.items())
    }
    return Results({"pretrain": Phase("pretrain", card("pretrain"), TASK, models)})


def claim(**changes) -> Claim:
    given = {
        "paper": "PRC",
        "says": "Views agree.",
        "metric": "match_top1",
        "method": "prc",
        "against": "vmoe",
        "better": "higher",
    }
    return Claim(**given | changes)


def test_the_difference_is_paired_by_seed():
    # differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t(2 degrees, 97.5 %) = 4.302653, half
    # width 4.302653 · 0.1 / √3 = 0.248414
    found = evaluate([claim()], study(vmoe=[0.1, 0.5, 0.2], prc=[0.2, 0.7, 0.5]))[0]
    assert (
        found.difference == pytest.approx((0.2, 0.2 - 0.248414, 0.2 + 0.248414), abs=1e-6)
        and found.verdict == "open"
    )
    # the same gaps around very different seeds: unpaired intervals overlap, the paired one
    # excludes 0
    found = evaluate([claim()], study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89]))[0]
    assert (
        found.verdict == "holds"
        and found.ours.interval.low < found.theirs.interval.value < found.ours.interval.value
    )
    assert found.difference == pytest.approx((0.1, 0.1 - 0.0248414, 0.1 + 0.0248414), abs=1e-6)


def test_direction_and_order_decide():
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89])
    cases = [
        {},
        {"better": "lower"},
        {"method": "vmoe", "against": "prc"},
        {"method": "vmoe", "against": "prc", "better": "lower"},
    ]
    assert [found.verdict for found in evaluate([claim(**case) for case in cases], shown)] == [
        "holds",
        "contradicted",
        "contradicted",
        "holds",
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 0.2, "holds"),
        (-0.2, -0.1, "contradicted"),
        (-0.1, 0.1, "open"),
        (0.0, 0.1, "open"),
        (-0.1, 0.0, "open"),
        (None, None, "open"),
    ],
)
def test_verdicts(low, high, expected):
    mirrored = Interval(0.0, None if high is None else -high, None if low is None else -low)
    assert verdict(Interval(0.0, low, high), "higher") == expected == verdict(mirrored, "lower")


def test_one_seed_is_open():
    found = evaluate([claim()], study(vmoe=[0.1], prc=[0.9]))[0]
    assert found.verdict == "open" and found.difference == (pytest.approx(0.8), None, None)
    assert (
        "one seed" in claims_markdown([found])
        and "(one seed)" in claim_lines(flat_claims([found]))[0]
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"metric": "match_top9"},
            r"claims\[1\].metric: found 'match_top9'; allowed: test_accuracy, test_loss, "
            r".*match_top1",
        ),
        (
            {"metric": "tail_mass"},
            r"claims\[1\].metric: found 'tail_mass'; allowed: ",
        ),  # known, but no model has it
        ({"method": "prcc"}, r"claims\[1\].method: found 'prcc'; allowed: dense, vmoe, prc$"),
        ({"against": "vmeo"}, r"claims\[1\].against: found 'vmeo'; allowed: dense, vmoe$"),
        ({"against": "prc"}, r"claims\[1\].against: found 'prc'; allowed: dense, vmoe$"),
        (
            {"against": "dense"},
            r"claims\[1\].against: dense has no match_top1; allowed: vmoe, prc$",
        ),
        ({"phase": "finetune"}, r"claims\[1\].phase: found 'finetune'; allowed: pretrain$"),
    ],
)
def test_what_is_not_there_is_named(changes, expected):
    with pytest.raises(UserError, match=expected):
        evaluate(
            [claim(), claim(**changes)], study(dense=[None, None], vmoe=[0.1, 0.2], prc=[0.3, 0.4])
        )


def test_an_interval_of_one_model_counts_by_its_value():
    shown = study(vmoe=[0.1, 0.2], prc=[0.3, 0.4])
    shown.phases["pretrain"].models["prc"][1] = model(1, 0.4, accuracy=0.54)
    # accuracies 0.50, 0.50 and 0.50, 0.54: differences 0, 0.04; t(1 degree) = 12.7062, deviation
    # 0.04/√2, half width 12.7062 · 0.02
    found = evaluate([claim(metric="test_accuracy")], shown)[0]
    assert found.difference == pytest.approx(
        (0.02, 0.02 - 12.7062 * 0.02, 0.02 + 12.7062 * 0.02), abs=1e-5
    )


def test_where_claims_are_shown(tmp_path):
    shown = results(tmp_path, seeds=(0, 1, 2))
    says = "Views <agree> | always"
    evaluated = evaluate(
        [claim(says=says, method="tgr"), claim(method="tgr", better="lower", phase="finetune")],
        shown,
    )
    text, lines = page(shown, evaluated), claims_markdown(evaluated).splitlines()
    assert_self_contained(text)
    assert (
        "Views &lt;agree&gt; | always" in text
        and text.index('id="claims"') < text.index('id="pretrain"')
        and 'href="#claims"' in text
    )
    assert lines[-2].startswith(
        "| PRC | Views <agree> \\| always | ✓ holds | +1.5 pp [+0.3 to +2.7] | tgr: 54.5 % ["
    )
    assert (
        lines[-2].endswith(" | Match, first expert (`match_top1`), higher is claimed, pretrain |")
        and "✗ contradicted" in lines[-1]
    )
    assert len({line.replace("\\|", "").count("|") for line in lines[4:]}) == 1
    stored = flat_claims(evaluated)
    first = next(iter(stored.values()))
    assert (
        next(iter(stored)) == "0: PRC, pretrain: match_top1 of tgr higher than of vmoe"
        and first["verdict"] == "holds"
    )
    # generated for seed s: tgr, method 2, has 0.54 + 0.005 s; vmoe, method 1, has 0.52 + 0.01 s
    assert first["method"]["mean"] == pytest.approx(0.545)
    assert first["against"]["mean"] == pytest.approx(0.53)
    assert first["difference"]["mean"] == pytest.approx(0.015) and first["difference"]["seeds"] == 3
    half = 4.302653 * 0.005 / math.sqrt(3)  # differences 0.02, 0.015, 0.01
    assert first["difference"]["low"] == pytest.approx(0.015 - half, abs=1e-6)
    assert claim_lines(stored)[0].startswith(
        "holds         PRC, pretrain: match_top1 of tgr higher than of vmoe: "
        "+0.0150 [+0.0026, +0.0274]"
    )
    assert [row["method"] for row in rows(flat(shown) | {"claims": stored})][:3] == [
        "dense",
        "vmoe",
        "tgr",
    ]


def test_without_claims_nothing_is_said(tmp_path):
    shown = results(tmp_path, {"dense": False}, phases=["pretrain"])
    assert (
        'id="claims"' not in page(shown)
        and "no claims" in claims_markdown([])
        and flat_claims([]) == {}
        and claim_lines({}) == []
    )


def test_by_hand():
    compared = {
        "dense": {
            "pretrain": {"test_accuracy": {"mean": 0.5, "low": 0.4, "high": 0.6}, "load_cv2": None}
        },
        "vmoe": {"pretrain": {"test_accuracy": {"mean": 0.625}, "load_cv2": {"mean": 0.0125}}},
        "claims": {"a": {"verdict": "holds"}},
    }
    assert cross_table(compared) == [
        "",
        "**pretrain**",
        "",
        "| method | accuracy | load CV² |",
        "| --- | ---: | ---: |",
        "| `dense` | 50.0% | – |",
        "| `vmoe` | 62.5% | 0.013 |",
    ]


def test_every_phase_has_its_own_columns():
    compared = {
        "vmoe": {
            "pretrain": {"mce": {"mean": 1.0}},
            "finetune": {"mce": None, "jumps": {"mean": 0.5}},
        }
    }
    text = "\n".join(cross_table(compared))
    assert (
        text.index("**pretrain**")
        < text.index("| method | mCE |")
        < text.index("**finetune**")
        < text.index("| method | jumps |")
    )
