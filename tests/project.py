"""A small copy of this project in which tests run the real stages, by hand or through DVC."""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from moecore.core.files import UserError
from moecore.core.source_layout import HASHES_DIR
from moecore.pipeline import code_hashes, run_folders, stage_client
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.pipeline.plan import plan_stages, query_pipeline_status, stages_changed_by_code
from moecore.run.history_file import read_dvc_locks
from moecore.run.stage_inputs import read_wheel_hashes
from moecore.study import params_writer, questions, stages, study, yaml_document
from moecore.study.check import check_without_data
from moecore.study.params_layers import ComposedParams, list_dvc_stages
from tests import forked

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "tests/params.yaml"  # as the root's is shipped; that one is its user's to edit
COPIED = ("moecore", "stages", "conformance/suite", "dvc.yaml", ".dvcignore", ".gitignore")
HALF_WRITTEN = "*.pyc.*"  # whole compiled files are copied: no copy is compiled anew

COMMAND = "from moecore.pipeline.cli import app; app()"
PARAMS = """\
run:
  methods: [dense, vmoe, tgr]
  seeds: [0]
  phases: [finetune]
  measurements: [invariance, lipschitz, cost]
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
  training: {epochs: 2, batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 4}
teacher_router: {steps: 20, batch: 64, learning_rate: 0.01}
pretrain:
  {epochs: 2, batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 4,
  views: {shift: 1, flip: true}}
finetune: {epochs: 2, batch: 32, learning_rate: 0.001, log_every: 5, checkpoint_every: 4, shots: 20}
calibrate: {calibrator: {kind: temperature}}
robustness:
  images: 32
  epsilons: [0.05]
  attacks: [{kind: fgsm}, {kind: pgd, steps: 2}]
  audit: {images: 16, steps: 2}
baselines: {images: 200}
transfer: {attack: {kind: pgd, steps: 2}, images: 16}
routing:
  {images: 32, augmentations: [flip], augmentation_images: 16,
  sweeps: {k: [1, 2], threshold: [0.5], images: 16}}
invariance: {images: 16}
corruptions: {images: 16, severities: [3], names: [fog, contrast]}
stability: {images: 8, overlays: 2, steps: 4}
lipschitz: {images: 4, lemma_tokens: 4}
cost: {batch: 8, rounds: 2, images: 16}
claims: []
questions: []
"""


def check_params(path: Path) -> study.Study:
    return check_without_data(yaml_document.load_yaml_document(path), list_dvc_stages(path.parent))


def forget_files() -> None:
    """Make this process read files of code again, which a test has edited."""
    caches = (
        code_hashes._read_and_analyse_source,
        code_hashes._imported_files,
        code_hashes._code_hash,
    )
    for cached in (
        *caches,
        code_hashes._module_file,
        code_hashes._non_python_files,
        read_wheel_hashes,
    ):
        cached.cache_clear()


def copy_shipped(folder: Path) -> Path:
    """Make ``folder`` a root as it is shipped: params.yaml, dvc.yaml, questions. Returns it."""
    shutil.copy(SHIPPED, folder / "params.yaml")
    shutil.copy(ROOT / "dvc.yaml", folder)
    if not (folder / "pipelines").exists():
        (folder / "pipelines").symlink_to(ROOT / "pipelines")
    return folder


def compose_shipped(name: str, presets: Sequence[str] = (), number: int = 1) -> ComposedParams:
    """A round of a question of ours over the params.yaml as it is shipped."""
    with TemporaryDirectory() as root:
        return questions.QuestionFile(copy_shipped(Path(root)), name).round(number).compose(presets)


def write_question(folder: Path, name: str, presets: Sequence[str] = ()) -> Path:
    """Write a question's params.yaml (returned) and dvc.yaml, two levels below the repository."""
    composed = compose_shipped(name, presets)
    check_without_data(composed.document, composed.all_stages)
    path = folder / "params.yaml"
    params_writer.write_and_diff_params(
        path, params_writer.dump_inline_yaml(composed.document.data)
    )
    run_folders.write_dvc_yaml_files(folder, composed.stages)
    return path


class Project:
    # whether stages and commands are forked from a server that has imported this repository's code
    forked = True
    root: Path | None = None  # where the code lies, if not in the folder: of a study

    def __init__(self, folder: Path, params: str = PARAMS) -> None:
        self.folder = folder
        self.copy_code()
        self.write(params)

    def copy_code(self) -> None:
        for name in COPIED:
            source, target = ROOT / name, self.folder / name
            if source.is_dir():
                ignored = shutil.ignore_patterns(HALF_WRITTEN)
                shutil.copytree(source, target, symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, target)
        for source in ROOT.glob("pipelines/*/paper.yaml"):  # moecore/pipeline/shipped links to them
            target = self.folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def copy(self, folder: Path) -> "Project":
        """All of it in another folder; it shares DVC's cache with this one."""
        ignored = shutil.ignore_patterns("cache", HALF_WRITTEN)
        shutil.copytree(self.folder, folder, symlinks=True, ignore=ignored)
        project = Project.at(folder)
        project.run(["dvc", "cache", "dir", str(self.folder / ".dvc/cache")])
        return project

    @classmethod
    def of_settings(cls, folder: Path) -> "Project":
        """A root without code, DVC and git, for what this process asks of its settings."""
        project = cls.at(folder)
        shutil.copy(ROOT / "dvc.yaml", folder)
        project.write()
        return project

    @classmethod
    def at(cls, folder: Path) -> "Project":
        project = cls.__new__(cls)
        project.folder = folder
        return project

    def locked(self, stage: str, key: str) -> set[str]:
        return {entry["path"] for entry in read_dvc_locks(self.folder)[stage].get(key, ())}

    def stale(self) -> dict[str, tuple[str, ...]]:
        """The stages that ``dvc repro`` would run, with the reasons; without ``code``."""
        forget_files()
        with contextlib.chdir(self.folder):
            pipeline = query_pipeline_status()
            planned = plan_stages(pipeline, {}, stages_changed_by_code(pipeline, self.folder))
        return {item.stage: item.reasons for item in planned if item.stage != stages.CODE_STAGE}

    def changed_by_dvc(self) -> set[str]:
        """The stages that DVC itself finds changed, without ``code``, which always runs."""
        return set(json.loads(self.run(["dvc", "status", "--json"]).stdout)) - {stages.CODE_STAGE}

    def write(self, params: str = PARAMS) -> None:
        (self.folder / "params.yaml").write_text(params, encoding="utf-8")

    def edit(self, old: str, new: str) -> None:
        text = (self.folder / "params.yaml").read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        self.write(text.replace(old, new))

    def with_dvc(self) -> "Project":
        for command in (["git", "init", "-q"], ["dvc", "init", "-q"]):
            self.run(command)
        return self

    @property
    def environment(self) -> dict[str, str]:
        ours = ("DVC", "MLFLOW", "MOECORE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
        if self.forked:
            folders.insert(0, str(forked.server() / "bin"))
            kept[stage_client.SOCKET_ENV] = str(forked.server() / "socket")
        return kept | {
            "PATH": os.pathsep.join(folders),
            "DVC_NO_ANALYTICS": "1",
            "MOECORE_THREADS": "1",  # two would wait for each other
            "PYTHONPATH": str(self.root or self.folder),
        }

    def run(self, command: list[str], env: dict | None = None) -> subprocess.CompletedProcess:
        done = self.attempt(command, env)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def attempt(self, command: list[str], env: dict | None = None) -> subprocess.CompletedProcess:
        given = self.environment | (env or {})
        return subprocess.run(command, cwd=self.folder, env=given, capture_output=True, text=True)

    def moecore(self, *words: str) -> subprocess.CompletedProcess:
        if self.forked:
            command = ("command", json.dumps(["moecore", *words]))
            return forked.run(self.folder, command, self.environment)
        return self.attempt([sys.executable, "-c", COMMAND, *words])

    def stage(self, *words: str) -> subprocess.CompletedProcess:
        done = self.attempt_stage(*words)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done

    def run_code(self, code: str) -> subprocess.CompletedProcess:
        """Python code in a process of its own."""
        return forked.run(self.folder, ("script", code), self.environment)

    def attempt_limited(self, size: int, *words: str) -> subprocess.CompletedProcess:
        """A stage whose files may have ``size`` bytes: writing past it fails as on a full disk."""
        self.hash_code()
        stage = forked.Stage(self.folder, words, self.environment)
        psutil.Process(stage.pid).rlimit(psutil.RLIMIT_FSIZE, (size, size))
        return subprocess.CompletedProcess(words, *stage.wait())

    def attempt_stage(self, *words: str, env: dict | None = None) -> subprocess.CompletedProcess:
        self.hash_code()
        if self.forked:
            return forked.run(self.folder, words, self.environment | (env or {}))
        return self.attempt([sys.executable, "-m", f"moecore.stages.{words[0]}", *words[1:]], env)

    def hash_code(self) -> None:
        """What the stage ``code`` does; nothing where params.yaml is wrong, as the stage says."""
        with contextlib.suppress(UserError):
            root = ROOT if self.forked else self.folder
            write_all_hashes(self.folder / "params.yaml", self.folder / HASHES_DIR, root)

    def repro(self, *words: str) -> list[str]:
        done = self.run(["dvc", "repro", *words])
        return re.findall("^Running stage '(.+?)'", done.stdout, re.M)

    def killed(self, *words: str, when) -> bool:
        """Start a stage and SIGKILL it as soon as ``when()``; False where it ended before."""
        self.hash_code()
        stage = forked.Stage(self.folder, words, self.environment)
        while stage.runs():
            if when():
                stage.kill()
                return True
            time.sleep(0.002)
        return False


@cache
def source_files() -> dict[str, str]:
    """Return path → text of every file of moecore, of its link conformance, and of stages."""
    linked = [*(ROOT / "stages").glob("*.py"), *(ROOT / "moecore/conformance").glob("*.py")]
    files = [*(ROOT / "moecore").rglob("*.py"), *linked]
    return {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in sorted(files)}


@cache
def syntax_trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text, path) for path, text in source_files().items()}
