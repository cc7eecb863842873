"""Predict what the files of a folder show, with a trained model.

FOLDER holds pictures of any size and mode, or volumes (BIDS, or .nii.gz files), also in subfolders.
In addition to a table, a page shows each file with its answer and its experts. A model with a text
tower compares pictures with the lines of --texts. A language model continues --prompt.

Probabilities are calibrated if `calibrate` has run. Exit codes: 0 all files have a prediction; 3
some have none, and their lines say why; 1 nothing is written. Before you predict ages, read
MODEL_CARD.md.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from moecore.core.files import UserError, explain_file_errors
from moecore.core.source_layout import allow_packages, check_package_name, package_folder
from moecore.predict.continuation import Sampling, continue_and_print
from moecore.predict.folder_predictions import PredictionRequest, predict_folder
from moecore.tracking.mlflow_run import SCHEME, model_folder


def predict_files(
    model: Annotated[str, Argument(help="its folder, or models:/… of MLflow")],
    folder: Annotated[Path | None, Argument(help="folder of the files to predict")] = None,
    out: Annotated[Path | None, Option(help="predictions.csv; of a text continued.html")] = None,
    calibrator: Annotated[Path | None, Option(help="folder with calibrator.json")] = None,
    batch: Annotated[int, Option(help="files a forward pass", min=1)] = 64,
    texts: Annotated[Path | None, Option(help="of a model of captions: one text per line")] = None,
    prompt: Annotated[Path | None, Option(help="a file with the beginning of a text")] = None,
    words: Annotated[int, Option(help="to add to the prompt", min=1)] = 50,
    temperature: Annotated[float, Option(help="divides logits; 0: the likeliest", min=0)] = 0.0,
    top_p: Annotated[float, Option(help="share of likeliest words", min=1e-6, max=1)] = 1.0,
    seed: Annotated[int, Option(help="of the words drawn", min=0)] = 0,
    package: Annotated[list[str] | None, Option(help="with parts of the model; repeatable")] = None,
) -> None:
    if (prompt is None) == (folder is None):
        raise UserError("predict: allowed: either FOLDER, or --prompt for a model of text")
    allow_packages(package or (), (Path(),))
    try:
        for name in package or ():
            package_folder(check_package_name(name))
    except ValueError as error:
        raise UserError(f"--package: {error}") from None
    path = model_folder(model) if model.startswith(SCHEME) else Path(model)
    if prompt is not None:
        sampling = Sampling(words, temperature, top_p, seed)
        continue_and_print(path, prompt, out or Path("continued.html"), sampling)
    elif folder is not None:
        table = out or Path("predictions.csv")
        request = PredictionRequest(path, folder, table, calibrator, batch, texts)
        sys.exit(3 if predict_folder(request) else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)  # one line
    app = Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(predict_files)
    try:
        with explain_file_errors():
            app(arguments, prog_name="moecore predict")
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
