"""The headline numbers: one list for the page's first table, MLflow, a run's file and the terminal.

Columns of attacks and of swapped words depend on the study; ``quantities`` picks theirs.
"""

from typing import NamedTuple


class Headline(NamedTuple):
    """A column that is shown first."""

    name: str  # of the column, a key of compare.json
    short: str = ""  # its name in the table of all methods; "" where it is not in it
    digits: str = ""  # how that table prints the mean
    first: bool = False  # in the first table of a phase, and of MLflow's parent runs
    run: bool = False  # in the file of a run
    terminal: bool = False  # in the summary on the terminal
    sentence: str = ""  # of how steady routing is, with a place for the values
    remains: bool = False  # the sentence tells what is left of 1
    title: str = ""  # of its panel in the overview


HEADLINES = (
    Headline("test_accuracy", "accuracy", ".1%", True, True, True),
    Headline("test_mae", first=True, run=True, terminal=True),
    Headline("ppl", "PPL", ".1f", first=True, run=True, terminal=True),
    Headline("test_nats", first=True, run=True),
    Headline("swapped_ppl_15", "PPL, swapped", ".1f", terminal=True),
    Headline("image_to_text_r1", "image → text R@1", ".1%"),
    Headline("zero_shot_accuracy", "zero-shot", ".1%"),
    Headline("median_mae", first=True),
    Headline("mae_of_median", first=True, terminal=True),
    Headline("mae_pooled", first=True, run=True, terminal=True),
    Headline("ece_after", "ECE", ".3f", first=True, run=True, terminal=True),
    Headline("isolated_wm", first=True, terminal=True),
    Headline("isolated_gm", first=True, terminal=True),
    Headline("isolated_csf", first=True, terminal=True),
    Headline("probe_wm", first=True, terminal=True),
    Headline("probe_gm", first=True, terminal=True),
    Headline("probe_csf", first=True, terminal=True),
    Headline("own_expert_gain", first=True, run=True, terminal=True),
    Headline("monotone", first=True, terminal=True),
    Headline("rescan", first=True, terminal=True),
    Headline("accuracy_worst_case", "attacked", ".1%"),
    Headline("routing_change_pgd-10", "routing change", ".3f"),
    Headline("mce", "mCE", ".3f", first=True, run=True),
    Headline(
        "noise_selection_change",
        "change by noise",
        ".3f",
        run=True,
        sentence="under noise routing overlap is {}",
        remains=True,
        title="Routing: overlap\nunder noise",
    ),
    Headline(
        "match_top1",
        "match top-1",
        ".1%",
        first=True,
        run=True,
        sentence="two views of an image share {} of the first experts",
        title="Routing: match of\ntwo views",
    ),
    Headline(
        "agreement_with_final",
        "agreement",
        ".1%",
        sentence="{} of the first experts are settled halfway through training",
        title="Routing: agreement\nwith the end",
    ),
    Headline("imed", "IMED", ".4f", run=True),
    Headline("swapped_change_1_5", run=True),
    Headline("confidence_highest", "confidence", ".3f"),
    Headline("load_cv2", "load CV²", ".3f", first=True, run=True, terminal=True),
    Headline("entropy", "entropy", ".3f", run=True, terminal=True),
    Headline("fallback", "fallback", ".1%"),
    Headline("jumps", "jumps", ".2f"),
    Headline("lipschitz_margin_mean", "margin slope", ".0f"),
    Headline(
        "active_parameters",
        "active parameters",
        ",.0f",
        first=True,
        run=True,
        terminal=True,
        title="Cost: million\nactive parameters",
    ),
    Headline("gflops", "GFLOPs", ".4f", title="Cost: million\nFLOPs an input"),
    Headline("latency_ms", "latency (ms)", ".2f", first=True, run=True),
    Headline("images_per_second", terminal=True),
    Headline("training_overhead", "training time", ".2f"),
)
