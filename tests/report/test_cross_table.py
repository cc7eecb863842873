"""The cross-table as Markdown: its columns are those that any method has, its cells means, a
dash where a method has none.
"""

from moecore.report.cross_table import cross_table


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
