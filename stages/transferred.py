"""``moecore.stages.transferred PHASE METHOD SEED``: attacks images on a model, to test others."""

from pathlib import Path

from moecore.core.config import Config
from moecore.core.files import UserError, atomic_folder
from moecore.core.safetensors_files import write_tensors
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel
from moecore.measure.robustness import TRANSFERRED, Robustness, target_on_drawn_images
from moecore.measure.values import Found
from moecore.run.run_record import record_run
from moecore.run.stage_entry import run_stage
from moecore.run.stage_inputs import read_stage_inputs
from moecore.study.params_reader import read_params
from moecore.study.run_and_claims import PhaseName
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime


class Params(Config):
    robustness: Robustness


def transferred(phase: PhaseName, method: str, seed: int) -> None:
    params = read_params(Params)
    attack = params.robustness.transfer
    if attack is None:
        raise UserError.at("robustness.transfer", found="null", allowed="an attack")
    item = f"{phase}/{method}/{seed}"
    artifacts = [Path("artifacts/data", phase), Path("artifacts", item)]
    inputs = read_stage_inputs("transferred", params, artifacts, phase, method)
    named = {"phase": phase, "method": method, "seed": seed}
    with record_run("transferred", params, inputs=inputs, **named) as run:
        model = load_model(artifacts[1]).to(tune_runtime().device)
        subject = MeasuredModel(model, Prepared.open(artifacts[0]))
        target = target_on_drawn_images(subject, params.robustness)
        epsilons = params.robustness.epsilons
        images = {str(epsilon): target.attacked(attack, epsilon) for epsilon in epsilons}
        with atomic_folder(Path("artifacts/transferred", item)) as folder:
            write_tensors(folder / TRANSFERRED, images)
        run.result(Found(values=(), facts={"attack": attack.name, "images": len(target.labels)}))


if __name__ == "__main__":
    run_stage(transferred)
