"""Stage ``finetune``: a pretrained model goes on with other data, at another resolution, with another k where asked.

``python -m stages.finetune vmoe 0`` writes artifacts/finetune/vmoe/0/. Killed at any moment, it goes on where it was.
"""

from typing import Annotated

from moecore.config import Config
from moecore.finetuning import finetuned
from moecore.params import Key, read
from moecore.stage import run_stage
from moecore.training.method import Method
from moecore.training.settings import Finetuning


class Params(Config):
    """What this stage reads of params.yaml."""

    finetune: Finetuning
    method: Annotated[Method, Key("methods.{method}")]


def finetune(method: str, seed: int) -> None:
    """Fine-tune artifacts/pretrain/``method``/``seed`` on artifacts/data/finetune."""
    params = read(Params, method=method)
    finetuned("finetune", method, seed, params, params.finetune, params.method, __file__)


if __name__ == "__main__":
    run_stage(finetune)
