"""The wheel in an environment of its own, outside of this clone, and a project that uses it."""

# The packages that moecore needs are those of this environment; of moecore itself only the wheel.

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from moecore.core.files import file_checksum, read_json
from moecore.core.source_layout import ROOT
from tests.my_lab import write_my_lab
from tools.distribution import build_distribution

BUILT_FROM = "moecore stages conformance pipelines params.yaml dvc.yaml pyproject.toml".split()
BUILD = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"
SMALL = (  # seconds in the place of a minute
    *("run.methods=[vmoe, cosine]", "run.measurements=[truth, my_study.brightness]"),
    *("methods.vmoe.regularizers=[{kind: my_study.calm}]", "my_study={brightness: {images: 8}}"),
    *"pretrain.epochs=1 data.pretrain.train=1000 robustness.images=20".split(),
    *"robustness.audit.images=10 routing.images=20 truth.images=10".split(),
)
OF_COSINE = (  # the stages of a method
    *"teacher_router@cosine pretrain@cosine robustness@pretrain-cosine".split(),
    *"routing@pretrain-cosine measure@truth-pretrain-cosine".split(),
    "measure@my_study.brightness-pretrain-cosine",
)


class Installed(NamedTuple):
    """An environment with the wheel, and a folder outside of the clone to work in."""

    environment: Path
    place: Path

    def attempt(self, *words: str | Path, folder: Path | None = None):
        """Run a command of the environment; nothing of this clone is on its path."""
        ours = ("DVC", "MLFLOW", "MOECORE", "PYTHON")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept |= {"PATH": path, "DVC_NO_ANALYTICS": "1", "MOECORE_THREADS": "1"}
        given = {"cwd": folder or self.place, "env": kept, "text": True}
        return subprocess.run([str(word) for word in words], capture_output=True, **given)

    def run(self, *words: str | Path, folder: Path | None = None) -> str:
        done = self.attempt(*words, folder=folder)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, source: Path) -> None:
        """Build a wheel of a source tree and install it, without a network."""
        wheels = source.parent / f"{source.name}_wheels"
        command = [sys.executable, "-c", BUILD, str(wheels)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        (wheel,) = wheels.glob("moecore-*.whl")
        pip = [sys.executable, "-m", "pip", "--python", str(self.environment / "bin/python")]
        words = ["install", "--no-deps", "--no-index", "--no-compile", "--force-reinstall", "-q"]
        subprocess.run([*pip, *words, str(wheel)], check=True)


def copy_source(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "artifacts", "reports", ".dvc", ".state")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    home = tmp_path_factory.mktemp("installed")
    environment = home / "venv"
    venv.create(environment, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    (home / "work").mkdir()
    package = Installed(environment, home / "work")
    package.install(copy_source(home / "source"))
    return package


@pytest.fixture(scope="module")
def project(installed) -> Path:
    """A small project that ran, with a regularizer, a measurement and a helper of its own too."""
    assert "my_study: begun from quick" in installed.run("moecore", "new", "my_study")
    folder = installed.place / "my_study"
    write_my_lab(folder / "src", "my_study")
    sets = [word for value in SMALL for word in ("-S", value)]
    printed = installed.run("moecore", "run", "--jobs", "2", *sets, folder=folder)
    assert "[pretrain vmoe 0] started" in printed
    return folder


def test_a_release_has_the_sdist_of_the_commit_and_a_wheel_with_its_modules(tmp_path):
    sdist, wheel = build_distribution(tmp_path)
    assert sdist.suffixes[-2:] == [".tar", ".gz"] and wheel.name.endswith("-py3-none-any.whl")


def test_there_is_moecore_and_no_package_stages(installed):
    where = "import moecore, moecore.stages; print(moecore.__file__, *moecore.stages.__path__)"
    for file in installed.run("python", "-c", where).split():
        assert Path(file).is_relative_to(installed.environment)
    for types in ("py.typed", "routers/__init__.pyi"):
        assert list(installed.environment.rglob(f"moecore/{types}")), types
    refused = installed.attempt("python", "-c", "import stages")
    assert refused.stderr.endswith("ModuleNotFoundError: No module named 'stages'\n")


def test_a_project_runs_to_its_page_and_then_nothing_runs(installed, project):
    page = (project / "reports/index.html").read_text(encoding="utf-8")
    assert "cosine" in page and "Brightness" in page
    card = read_json(project / "artifacts/pretrain/cosine/0/model.json")
    assert card["moe"]["router"]["kind"] == "my_study.cosine"
    assert sorted(card["versions"]) == ["moecore", "my_study", "torch"]
    written = (project / "artifacts/history/pretrain/cosine/0/history.jsonl").read_text()
    assert json.loads(written.split("\n")[0])["versions"] == card["versions"]
    history = project / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    assert "my_study.calm" in history.read_text(encoding="utf-8")
    hashes = json.loads((project / "artifacts/code/stages/pretrain.json").read_text())
    assert {"moecore/stages/pretrain.py", "moecore/training/loop.py"} <= hashes.keys()
    repro = installed.run("python", "-m", "dvc", "repro", folder=project)
    assert re.findall(r"Running stage '(.*)'", repro) == ["code"]
    assert "params.schema.json: written" in installed.run("moecore", "schema", folder=project)
    assert not list(installed.environment.rglob("params.schema.json"))


def test_an_edit_of_a_users_file_reruns_what_uses_it_and_nothing_else(installed, project):
    """A helper, a loss, a measurement, its page. Of DVC itself see test_what_reruns.py."""
    edited = {
        "directions": {f"{stage}-0" for stage in OF_COSINE},
        "calm": {f"{stage}-0".replace("cosine", "vmoe") for stage in OF_COSINE},
        "brightness": {
            *(f"measure@my_study.brightness-pretrain-{name}-0" for name in ("vmoe", "cosine")),
            "compare",
        },
        "pages/brightness": {"compare"},
    }
    files = {module: project / f"src/my_study/{module}.py" for module in edited}
    texts = {module: file.read_text(encoding="utf-8") for module, file in files.items()}
    for file in files.values():
        file.write_text(f"{file.read_text('utf-8')}\n# a comment\n", encoding="utf-8")
    assert "up to date" in installed.run("moecore", "plan", folder=project)
    for module, file in files.items():
        file.write_text(f"{texts[module]}\nEDITED = True\n", encoding="utf-8")
    lines = installed.run("moecore", "plan", folder=project).splitlines()
    for module, stages in edited.items():
        reason = f"my_study/{module}.py edited"
        assert {line.split()[0] for line in lines if reason in line} == stages
        files[module].write_text(texts[module], encoding="utf-8")


def test_make_sets_up_tests_and_checks(installed, project):
    (installed.environment / ".installed").touch()  # what pip would have downloaded is there
    venv_here = f"VENV={installed.environment}"
    assert "2 passed" in installed.run("make", "test", venv_here, folder=project)
    assert "params.yaml: in order" in installed.run("make", "check", venv_here, folder=project)


def test_its_model_loads_elsewhere(installed, project):
    code = "import sys, torch; from moecore.training.artifacts import load_model\n"
    code += "print(load_model(sys.argv[1])(torch.rand(2, 4, 28, 28)).prediction.shape)"
    model = shutil.copytree(project / "artifacts/pretrain/vmoe/0", installed.place / "model")
    assert installed.run("python", "-c", code, model) == "torch.Size([2, 40])\n"


def test_a_patched_wheel_says_what_runs_again_and_then_the_project_is_its(installed, project):
    source = copy_source(installed.place / "patched")
    pyproject = source / "pyproject.toml"
    (old,) = re.findall('^version = "(.*)"', pyproject.read_text(encoding="utf-8"), re.M)
    new = f"{old.rpartition('.')[0]}.99"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace(f'version = "{old}"', f'version = "{new}"'))
    edits = {"nn/routers/noisy_top_k.py": "EDITED = True"}
    edits["pipeline/project_template/Makefile"] = "# patched"
    for file, more in edits.items():
        with open(source / "moecore" / file, "a", encoding="utf-8") as handle:
            handle.write(f"\n{more}\n")
    installed.install(source)
    before = (project / "Makefile").read_text(encoding="utf-8")
    said = installed.run("moecore", "upgrade", folder=project)
    assert said.startswith(f"moecore {old} → {new}\n") and "\n+# patched\n" in said
    assert re.search(r"^ *pretrain@vmoe-0 .*moecore/nn/routers/noisy_top_k.py edited$", said, re.M)
    assert "prepare@pretrain" not in said
    assert (project / "Makefile").read_text(encoding="utf-8") == before
    assert installed.run("moecore", "upgrade", "--yes", folder=project).endswith("written\n")
    assert (project / "Makefile").read_text(encoding="utf-8").endswith("# patched\n")
    (wheel,) = installed.place.glob(f"patched_wheels/moecore-{new}-*.whl")
    required = (project / "pyproject.toml").read_text(encoding="utf-8")
    (checksum,) = re.findall(f'"moecore @ {wheel.as_uri()}(.*?)"', required)
    assert checksum in (f"#sha256={file_checksum(wheel)}", "")  # not every pip records it
