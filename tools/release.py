"""Pack a finished run for a release, from which `moecore pull` takes it.

    python -m tools.release                    # dist/moecore-run-default-VERSION.tar
    python -m tools.release .runs/ours.quick   # dist/moecore-run-ours.quick-VERSION.tar

An archive holds a DVC remote (`dvc push` writes it), dvc.lock, params.yaml, reports and a
model card per model. The file NAME.tar.sha256 beside it has its checksum.
"""

import argparse
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from dvc.repo import Repo

from moecore.core.files import UserError, atomic_file, file_checksum, read_json, write_atomic
from moecore.pipeline.plan import list_stale_stages
from moecore.pipeline.pull import MODEL_CARDS, REMOTE, archive_name

FILES = ("params.yaml", "dvc.lock", "steps/*/dvc.lock", "reports/index.html")
FILES += ("reports/explorer.html", "reports/compare.json", "reports/items.safetensors")
NEVER_RUN = "a run of whose stages none would run (`moecore plan`)"


def pack_run(folder: Path, out: Path) -> Path:
    """Write the archive of a finished run to the folder ``out``; return it; UserError if stale."""
    target = out.resolve() / archive_name(folder)
    with tempfile.TemporaryDirectory() as scratch, chdir(folder):
        if stale := list_stale_stages():
            problem = f"{len(stale)} stages that would run, first {stale[0].stage}"
            raise UserError.at(folder, found=problem, allowed=NEVER_RUN)
        with Repo(config={"remote": {"release": {"url": scratch}}}) as repo:
            repo.push(remote="release")
        with atomic_file(target) as temporary, tarfile.open(temporary, "w") as archive:
            for pattern in FILES:
                for path in sorted(Path().glob(pattern)):
                    archive.add(path)
            archive.add(scratch, REMOTE)
            for name, text in model_cards(Path("artifacts")):
                card = Path(scratch) / "card.md"
                card.write_text(text, encoding="utf-8")
                archive.add(card, f"{MODEL_CARDS}/{name}.md")
    write_atomic(f"{target}.sha256", f"{file_checksum(target)}  {target.name}\n")
    return target


def model_cards(artifacts: Path) -> Iterator[tuple[str, str]]:
    """Yield phase.method.seed and Markdown for every model that has a score."""
    for path in sorted(artifacts.glob("*/*/*/score.json")):
        phase, method, seed = path.parts[-4:-1]
        data = read_json(artifacts / "data" / phase / "card.json")
        model = read_json(path.with_name("model.json"))
        yield f"{phase}.{method}.{seed}", render_card(path.parent, data, model, read_json(path))


def render_card(
    folder: Path, data: Mapping[str, Any], model: Mapping[str, Any], score: Mapping[str, Any]
) -> str:
    """Return a model card: method, data, score with its interval, licences, limits."""
    phase, method, seed = folder.parts[-3:]
    test = score["test_score"]
    interval = f" (95 % interval {test['low']:.4g} to {test['high']:.4g})" if "low" in test else ""
    mixture = "no experts"
    if parts := model.get("moe"):
        experts = parts["experts"]
        router = parts["router"]["kind"]
        mixture = f"{experts['number']} experts `{experts['kind']}`, router `{router}`"
    images = ", ".join(f"{number} {split}" for split, number in data["images"].items())
    return f"""# {method}, {phase}, seed {seed}

- Model: `{model["backbone"]["kind"]}`, {mixture}; every setting: `{folder}/model.json`
- Data: {data["name"]}; images: {images}
- Task: {data["task"]["kind"]}
- Test score on {score["test_count"]} items: {test["value"]:.4g}{interval}
- Licence of the data: {data["licence"]}; source: {data["source"]}
- Licence of the weights: Apache-2.0, as moecore's
- Use: `moecore.load_model("{folder}")`
- Meant for comparing routing methods on these data; one seed, and not tested on others.
"""


def main() -> None:
    """Read the command line and pack."""
    parser = argparse.ArgumentParser(description="Pack a finished run for a release.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="of the run")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where the archive goes")
    options = parser.parse_args()
    try:
        print(os.path.relpath(pack_run(options.folder, options.out)))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
