"""Predict what the files of a folder show, with a trained model.

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

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moecore.core.files import UserError
from moecore.predict.continuation import Sampling, continue_file
from moecore.predict.predictions import Given, predict_folder
from moecore.tracking.model import SCHEME, model_folder


def build_option(text: str, **limits: Any) -> Any:
    return typer.Option(help=text, **limits)


def predict_or_continue(
    model: Annotated[str, typer.Argument(help="the folder of a model, or models:/…")],
    folder: Annotated[Path | None, typer.Argument(help="folder of the files to predict")] = None,
    out: Annotated[
        Path | None, build_option("the table, predictions.csv; of a text the page")
    ] = None,
    calibrator: Annotated[
        Path | None, build_option("folder with calibrator.json of the model")
    ] = None,
    batch: Annotated[int, build_option("files a forward pass", min=1)] = 64,
    texts: Annotated[Path | None, build_option("of a model of captions: a text per line")] = None,
    prompt: Annotated[Path | None, build_option("a file with the beginning of a text")] = None,
    words: Annotated[int, build_option("to add to the prompt", min=1)] = 50,
    temperature: Annotated[
        float, build_option("divides the logits; 0: the likeliest", min=0)
    ] = 0.0,
    top_p: Annotated[float, build_option("of the words to draw from", min=1e-6, max=1)] = 1.0,
    seed: Annotated[int, build_option("of the words drawn", min=0)] = 0,
) -> None:
    path = model_folder(model) if model.startswith(SCHEME) else Path(model)
    if prompt is not None and folder is None:
        sampling = Sampling(words, temperature, top_p, seed)
        page = out or Path("continued.html")
        continuation = continue_file(path, prompt, page, sampling)
        print(" ".join(word.word for word in continuation.words if not word.given))
        for remark in (*continuation.remarks, f"{page}: every word with its experts"):
            print(remark, file=sys.stderr)
    elif prompt is None and folder is not None:
        table = out or Path("predictions.csv")
        if predict_folder(Given(path, folder, table, calibrator, batch, texts)):
            sys.exit(3)
    else:
        raise UserError("predict: allowed: either FOLDER, or --prompt for a model of text")


def main(words: Sequence[str] | None = None) -> None:
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)  # one line
    program = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    program.command(help=__doc__)(predict_or_continue)
    try:
        program(words, prog_name="moecore predict")
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
