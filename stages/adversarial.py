"""Stage ``adversarial``: the model that ``finetune`` starts from, fine-tuned on attacked images, so that both stand side by side.

``python -m stages.adversarial vmoe 0`` writes artifacts/adversarial/vmoe/0/ (adversarial-moe, §4.2: PGD of 10 steps, 8/255).
A study gives ``data.adversarial`` the same settings as ``data.finetune``. Killed at any moment, it goes on where it was.
"""

from typing import Annotated

from moecore.config import Config
from moecore.finetuning import finetuned
from moecore.params import Key, read
from moecore.stage import run_stage
from moecore.training.method import Method
from moecore.training.settings import AdversarialFinetuning


class Params(Config):
    """What this stage reads of params.yaml."""

    adversarial: AdversarialFinetuning
    method: Annotated[Method, Key("methods.{method}")]


def adversarial(method: str, seed: int) -> None:
    """Fine-tune artifacts/pretrain/``method``/``seed`` on attacked images of artifacts/data/adversarial."""
    params = read(Params, method=method)
    finetuned("adversarial", method, seed, params, params.adversarial, params.method, __file__)


if __name__ == "__main__":
    run_stage(adversarial)
