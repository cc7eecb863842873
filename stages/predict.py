"""Predict the ages of new volumes with a trained and calibrated model. No stage: a tool for users.

    python -m stages.predict artifacts/pretrain/ermoe_ba/0 FOLDER --out predictions.csv

FOLDER is in BIDS form, or holds .nii.gz files; participants.tsv in it may give sex (for the
correction per sex) and age (for brain-PAD). The calibrator is found beside the model
(artifacts/calibrate/<phase>/<method>/<seed>) or named by --calibrator. Volumes unlike those of
training are flagged in the column qc_flags and on stderr. Read MODEL_CARD.md first: it says what
the numbers may not be used for.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from moecore.brain.new_ages import predict_ages
from moecore.core.files import UserError


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        prog="python -m stages.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = words.add_argument
    add("model", type=Path, help="folder of the trained model, artifacts/<phase>/<method>/<seed>")
    add("folder", type=Path, help="folder of the new volumes")
    add("--out", type=Path, default=Path("predictions.csv"), help="the table to write")
    add("--calibrator", type=Path, help="folder with calibrator.json; default: that of the model")
    add("--on-error", choices=("stop", "skip"), default="stop", help="volumes that cannot be used")
    add("--batch", type=int, default=8, help="volumes a forward pass")
    return words


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    # One line each, without our own source.
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
    try:
        rows = predict_ages(
            given.model, given.folder, given.out, given.calibrator, given.on_error, given.batch
        )
    except UserError as error:
        sys.exit(str(error))
    flagged = [row for row in rows if row.qc_flags]
    for row in flagged:
        print(f"{row.participant_id} {row.session_id}: {row.qc_flags}", file=sys.stderr)
    count = f"{len(rows)} volumes, {len(flagged)} flagged"
    print(f"{given.out}: {count}. Read MODEL_CARD.md before using them.")


if __name__ == "__main__":
    main()
