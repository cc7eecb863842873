"""``moecore.stages.transferred PHASE METHOD SEED``: attacks images on a model, to test others."""

from pathlib import Path

from moecore.core import config, files, safetensors_files
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel
from moecore.measure.robustness import TRANSFERRED_IMAGES_FILE, Robustness, target_on_drawn_images
from moecore.measure.values import Found
from moecore.run import run_record, stage_entry, stage_inputs
from moecore.study import params_reader, run_and_claims
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime


class Params(config.Config):
    robustness: Robustness


def transferred(phase: run_and_claims.PhaseName, method: str, seed: int) -> None:
    params = params_reader.read_stage_params(Params)
    attack = params.robustness.transfer
    if attack is None:
        raise files.UserError.at("robustness.transfer", found="null", allowed="an attack")
    item = f"{phase}/{method}/{seed}"
    artifacts = [Path("artifacts/data", phase), Path("artifacts", item)]
    inputs = stage_inputs.build_stage_inputs("transferred", params, artifacts, phase, method)
    named = {"phase": phase, "method": method, "seed": seed}
    with run_record.record_run("transferred", params, inputs=inputs, **named) as run:
        model = load_model(artifacts[1]).to(tune_runtime().device)
        subject = MeasuredModel(model, Prepared.open(artifacts[0]))
        target = target_on_drawn_images(subject, params.robustness)
        epsilons = params.robustness.epsilons
        images = {str(epsilon): target.attacked(attack, epsilon) for epsilon in epsilons}
        with files.atomic_folder(Path("artifacts/transferred", item)) as folder:
            safetensors_files.write_tensors(folder / TRANSFERRED_IMAGES_FILE, images)
        facts = {"attack": attack.name, "images": len(target.labels)}
        run.write_result(Found(values=(), facts=facts))


if __name__ == "__main__":
    stage_entry.run_stage(transferred)
