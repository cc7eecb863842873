"""Predict what the files of a folder show, with a trained model. No stage: a tool for users.

    moecore predict artifacts/finetune/vmoe/0 FOLDER --out predictions.csv
    moecore predict artifacts/finetune/ermoe/0 FOLDER --texts captions.txt
    moecore predict artifacts/pretrain/smoe/0 --prompt prompt.txt --out continued.html

MODEL is the folder of a trained model, or models:/study.method.phase.seed@current of MLflow's
registry. FOLDER holds pictures of any size and mode, or volumes (BIDS, or .nii.gz files), in
subfolders too. Beside the table a page, OUT.html, shows each with its answer and its experts. Two
towers compare pictures with the lines of --texts. A language model continues --prompt.

Probabilities are calibrated where `calibrate` has run. A file that cannot be read keeps a line with
the reason. Exit: 0 all files have a prediction; 3 some have none, all others are written; 1 nothing
is written. Of ages, read MODEL_CARD.md first.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from moecore.core.files import UserError
from moecore.predict.continuation import add_sampling_arguments, print_continuation
from moecore.predict.predictions import Given, add_folder_arguments, predict_folder
from moecore.tracking.model import SCHEME, model_folder


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    words = argparse.ArgumentParser("moecore predict", None, __doc__, formatter_class=raw)
    words.add_argument("model", metavar="MODEL", help="the folder of a model, or models:/…")
    add_folder_arguments(words)
    add_sampling_arguments(words)
    return words


def main(words: Sequence[str] | None = None) -> None:
    given, failed = build_parser().parse_args(words), 0
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)  # one line
    try:
        model = Path(given.model)
        if given.model.startswith(SCHEME):
            model = model_folder(given.model)
        if (given.prompt is None) == (given.folder is None):
            raise UserError("predict: allowed: either FOLDER, or --prompt for a model of text")
        if given.prompt is not None:
            print_continuation(model, given)
        else:
            table = given.out or Path("predictions.csv")
            last = (given.calibrator, given.batch, given.texts)
            failed = predict_folder(Given(model, given.folder, table, *last))
    except UserError as error:
        sys.exit(str(error))
    if failed:
        sys.exit(3)


if __name__ == "__main__":
    main()
