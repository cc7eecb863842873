"""Predict what the files of a folder show, with a trained model. No stage: a tool for users.

    moecore predict artifacts/finetune/vmoe/0 FOLDER --out predictions.csv

MODEL is the folder of a trained model, or models:/study.method.phase.seed@current of MLflow's
registry. FOLDER holds pictures of any size and mode, in subfolders too; for a model of volumes it
is in BIDS form, or holds .nii.gz files, and participants.tsv may give sex and age. Beside the table
comes a page, OUT.html, that shows every picture with its answer and the experts of its patches.

Probabilities are calibrated where the stage `calibrate` has run for this model; --calibrator names
another folder with calibrator.json. A file that cannot be read keeps a line with the reason.
Exit: 0 all files have a prediction; 3 some have none, all others are written; 1 nothing is written.
Of ages, read MODEL_CARD.md first: it says what the numbers may not be used for.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from moecore.core.files import UserError
from moecore.run.predictions import predict_folder
from moecore.tracking.model import SCHEME, model_folder


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        prog="moecore predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = words.add_argument
    add("model", metavar="MODEL", help="artifacts/<phase>/<method>/<seed>, or models:/…")
    add("folder", metavar="FOLDER", type=Path, help="folder of the files to predict")
    add("--out", type=Path, default=Path("predictions.csv"), help="the table to write")
    add("--calibrator", type=Path, help="folder with calibrator.json; default: that of the model")
    add("--batch", type=int, default=64, help="files a forward pass")
    return words


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    # One line each, without our own source.
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
    try:
        model = Path(given.model)
        if given.model.startswith(SCHEME):
            model = model_folder(given.model)
        failed = predict_folder(
            model, given.folder, given.out, given.calibrator, max(1, given.batch)
        )
    except UserError as error:
        sys.exit(str(error))
    if failed:
        sys.exit(3)


if __name__ == "__main__":
    main()
