"""A small copy of this project in which tests run the real stages, by hand or through DVC."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("moecore", "stages", "dvc.yaml", ".dvcignore", ".gitignore")

PARAMS = """\
run:
  methods: [dense, vmoe, tgr]
  seeds: [0]
  phases: [finetune]
  thorough: [finetune]
data:
  pretrain: {kind: digits, size: 16}
  finetune: {kind: digits, size: 24, seed: 1}
model: {kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}
methods:
  dense: {}
  vmoe:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
    regularizers:
      - {kind: importance, weight: 0.005}
      - {kind: load, weight: 0.005}
  tgr:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
    regularizers:
      - {kind: router_kl, weight: 5.0}
  other:
    router: {kind: noisy_top_k, k: 1}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
    regularizers:
      - {kind: z_loss, weight: 0.001}
teacher:
  kind: dense
  model: {kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}
  training: {epochs: 2, batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 5}
teacher_router: {steps: 20, batch: 64, learning_rate: 0.01}
pretrain: {epochs: 2, batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 5, views: {shift: 1, flip: true}}
finetune: {epochs: 2, batch: 32, learning_rate: 0.001, log_every: 5, checkpoint_every: 5, shots: 20}
calibrate: {calibrator: {kind: temperature}}
robustness:
  images: 32
  epsilons: [0.05]
  attacks: [{kind: fgsm}, {kind: pgd, steps: 2}]
  audit: {images: 16, steps: 2}
routing: {images: 32, augmentations: [flip], augmentation_images: 16, sweeps: {k: [1, 2], threshold: [0.5], images: 16}}
invariance: {images: 16}
corruptions: {images: 16, severities: [3], names: [fog, contrast]}
stability: {images: 8, overlays: 2, steps: 4}
lipschitz: {images: 4, lemma_tokens: 4, steps: 2, halvings: 2}
cost: {batch: 8, rounds: 2, images: 16}
claims: []
"""


class Project:
    """A folder with a copy of the code, a small params.yaml, and ways to run it."""

    def __init__(self, folder: Path, params: str = PARAMS) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        self.write(params)

    def write(self, params: str) -> None:
        (self.folder / "params.yaml").write_text(params, encoding="utf-8")

    def edit(self, old: str, new: str) -> None:
        """Replace text that occurs in params.yaml exactly once."""
        text = (self.folder / "params.yaml").read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        self.write(text.replace(old, new))

    def with_dvc(self) -> "Project":
        for command in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "config", "core.analytics", "false"]):
            self.run(command)
        return self

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DVC", "MLFLOW", "MOECORE"))}
        bin_folder = str(Path(sys.executable).parent)
        return kept | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "MOECORE_TRACKING": "off", "DVC_NO_ANALYTICS": "1", "PYTHONPATH": str(self.folder)}

    def run(self, command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run a command that must succeed."""
        done = self.attempt(command, env)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def attempt(self, command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(command, cwd=self.folder, env=self.environment | (env or {}), capture_output=True, text=True)

    def stage(self, *words: str) -> subprocess.CompletedProcess:
        return self.run([sys.executable, "-m", f"stages.{words[0]}", *words[1:]])

    def attempt_stage(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        return self.attempt([sys.executable, "-m", f"stages.{words[0]}", *words[1:]], env)

    def repro(self, *words: str) -> list[str]:
        """``dvc repro``; returns the stages that ran, in order."""
        done = self.run(["dvc", "repro", *words])
        return [line.split("'")[1] for line in done.stdout.splitlines() if line.startswith("Running stage")]

    def killed(self, *words: str, when) -> bool:
        """Start a stage and SIGKILL it as soon as ``when()``; False where it ended before."""
        process = subprocess.Popen([sys.executable, "-m", f"stages.{words[0]}", *words[1:]], cwd=self.folder, env=self.environment, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if when():
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.002)
        return False
