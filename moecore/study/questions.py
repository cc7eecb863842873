"""The questions below pipelines/: a file each, in folders by paper.

``pipelines/tgr/table_3.yaml`` is the question ``tgr/table_3``. Its layers are the root's
params.yaml, the world that it names, the file, a round, and presets (``layers.py`` says how layers
are composed). Beyond sections of params.yaml a question has:

- ``question``, ``answer``: what is asked and what was found, one line each; ``headlines``:
  questions and answers in one line for the first screen of pipelines/README.md.
- ``world``: what the question holds equal with others, ``pipelines/worlds/<world>.yaml``.
- ``methods``: the question's methods, or a list of names where all are as in the world or the
  root. They are also ``run.methods``, unless ``run`` names others.
- ``asks``: the claims of papers that it answers, by name (``papers.py``).
- ``rounds``: runs of the question with other seeds, methods or claims. ``was``: the name that a
  round had as a study of moecore 0.2; ``seeds``: ``[0, 1]`` or ``0-1``; ``methods``: a list of
  names. A question without rounds has one, whose keys stand in the file itself.
- ``presets``: settings by name that are laid over the rest when they are asked for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError
from moecore.core.source_layout import RUNS
from moecore.study.document import Document, did_you_mean, load_yaml_document, show_value
from moecore.study.layers import (
    Composed,
    Layer,
    compose_layers,
    load_root_layer,
    read_layer,
)
from moecore.study.papers import (
    ASKS,
    PAPER_FILE,
    PIPELINES,
    expand_asks,
    find_paper_file,
    split_asked,
)
from moecore.study.settings import format_error_line

WORLDS = "worlds"
RESULTS = "results"
TEXTS = ("question", "answer", "world", "was")
DIRECTIVES = (*TEXTS, "headlines", "seeds", "rounds", "presets", ASKS)
ROUND_DIRECTIVES = ("was", "seeds", ASKS)
SEEDS = re.compile(r"(\d+)-(\d+)")
MAX_SEEDS = 1000


class QuestionFile:
    """A file of pipelines/<folder>/, with the layers below it."""

    def __init__(self, root: Path, name: str) -> None:
        """Read the question ``name`` (folder/file) of the project ``root``.

        Raises UserError where the file is not in order.
        """
        self.root = root
        self.name = name
        self.path = root / PIPELINES / f"{name}.yaml"
        self.document = load_yaml_document(self.path)
        self.layers = self._read_layers()
        self.rounds = [
            Round(self, index + 1, *pair) for index, pair in enumerate(self._read_rounds())
        ]

    def text(self, key: str) -> str:
        """Return the text at a key of ``TEXTS``; "" where there is none."""
        return self.document.data.get(key) or ""

    @cached_property
    def presets(self) -> dict[str, Document]:
        """Name → preset. Raises UserError where they are no mapping."""
        return _named_parts(self.document, "presets")

    def round(self, number: int | None) -> "Round":
        """Return the round of this number; None: the last one. UserError for any other number."""
        if number is None:
            return self.rounds[-1]
        if not 1 <= number <= len(self.rounds):
            allowed = f"1 to {len(self.rounds)}" if len(self.rounds) > 1 else "1, the only round"
            raise UserError(f"{self.name}: found round {number}; allowed: {allowed}")
        return self.rounds[number - 1]

    def preset_layers(self, names: Sequence[str]) -> list[Layer]:
        """Return the presets of these names. Raises UserError for a name that is none."""
        layers = []
        for name in names:
            if name not in self.presets:
                allowed = ", ".join(self.presets) or "none, it has no presets"
                hint = did_you_mean(name, list(self.presets))
                raise UserError(f"{self.name}: found no preset {name!r}{hint}; allowed: {allowed}")
            layers.append(self._expand(read_layer(self.presets[name], self._packages, (ASKS,))))
        return layers

    @property
    def asking_files(self) -> list[Path]:
        """Return the question's file, and the project's own of papers whose claims it asks for."""
        data = self.document.data
        parts = (data, *(data.get("rounds") or ()))
        papers = (split_asked(asked)[0] for part in parts for asked in part.get(ASKS) or ())
        files = [find_paper_file(self.root, one) for one in dict.fromkeys(papers)]
        return [self.path, *(file for file in files if self.root in file.parents)]

    def _expand(self, layer: Layer) -> Layer:
        """Return a layer of a question with the claims that it asks for, written out."""
        if ASKS not in (layer.document.data or {}):
            return layer
        if "claims" in layer.sections:
            text = f"found it beside {ASKS}; allowed: one of them"
            raise UserError(format_error_line(layer.document, ("claims",), text))
        claims, moved = expand_asks(layer.document, self.root)
        sections = {**layer.sections, "claims": claims}
        return layer._replace(sections=sections, moved={**layer.moved, **moved})

    @property
    def _packages(self) -> tuple[str, ...]:
        return tuple(name for layer in self.layers for name in layer.document.packages)

    def _read_layers(self) -> list[Layer]:
        layers = [load_root_layer(self.root)]
        own = read_layer(self.document, layers[0].document.packages, DIRECTIVES)
        if not isinstance(self.document.data, dict):
            raise UserError(f"{self.path}:1:1: is empty; allowed: a question and its sections")
        for key in TEXTS:
            value = self.document.data.get(key, "")
            if not isinstance(value, str):
                text = f"found {show_value(value)}; allowed: a text"
                raise UserError(format_error_line(self.document, (key,), text))
        self._check_headlines()
        if self.text("world"):
            layers.append(self._load_world())
        return [*layers, self._expand(own)]

    def _check_headlines(self) -> None:
        headlines = self.document.data.get("headlines", {})
        words = headlines.values() if isinstance(headlines, dict) else [headlines]
        if not all(isinstance(word, str) for word in words):
            text = "found something else; allowed: questions with answers, in one line each"
            raise UserError(format_error_line(self.document, ("headlines",), text))

    def _load_world(self) -> Layer:
        name = self.text("world")
        folder = self.root / PIPELINES / WORLDS
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        if name not in known:
            text = f"found {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}"
            raise UserError(format_error_line(self.document, ("world",), text))
        return read_layer(load_yaml_document(folder / f"{name}.yaml"), ())

    def _read_rounds(self) -> Iterator[tuple[Document, list[Layer]]]:
        """Yield each round's document, and its layers on those of the world."""
        below, own = self.layers[:-1], self.layers[-1]
        rounds = self.document.data.get("rounds")
        if rounds is None:
            yield self.document, [*below, _move_run_keys(own)]
            return
        if not isinstance(rounds, list) or not rounds:
            text = f"found {show_value(rounds)}; allowed: a list of at least one round"
            raise UserError(format_error_line(self.document, ("rounds",), text))
        for key in ("was", "seeds"):
            if key in self.document.data:
                text = "found it beside rounds; allowed: in each of them"
                raise UserError(format_error_line(self.document, (key,), text))
        for index in range(len(rounds)):
            part = self.document.below("rounds").below(index)
            layer = self._expand(read_layer(part, self._packages, ROUND_DIRECTIVES))
            if not isinstance(layer.sections.get("methods", []), list):
                text = f"found {show_value(layer.sections['methods'])}; allowed: a list of names"
                raise UserError(format_error_line(part, ("methods",), text))
            yield part, [*below, _move_run_keys(own), _move_run_keys(layer)]


class Round(NamedTuple):
    """One run of a question: number counts from 1."""

    question: QuestionFile
    number: int
    document: Document
    layers: list[Layer]

    @property
    def name(self) -> str:
        """``tgr/table_3``, from the second round on ``tgr/table_3.2``."""
        suffix = f".{self.number}" if self.number > 1 else ""
        return self.question.name + suffix

    @property
    def was(self) -> str:
        """Return its name as a study of moecore 0.2; "" where it had none."""
        return (self.document.data or {}).get("was") or ""

    @property
    def folder(self) -> Path:
        """Return the folder in which it runs."""
        return self.question.root / RUNS / self.name.replace("/", ".")

    @property
    def results(self) -> Path:
        """Return the file of its numbers, which git keeps."""
        return self.question.root / PIPELINES / RESULTS / f"{self.name}.json"

    @property
    def command(self) -> str:
        """Return what runs it."""
        chosen = f" --round {self.number}" if len(self.question.rounds) > 1 else ""
        return f"moecore study run {self.question.name}{chosen}"

    def compose(self, presets: Sequence[str] = ()) -> Composed:
        """Return its params.yaml with these presets, in order.

        Raises UserError where a preset or a method does not exist.
        """
        layers = [*self.layers, *self.question.preset_layers(presets)]
        return compose_layers(layers, self.question.root)


def list_question_names(root: Path) -> list[str]:
    """Return the names of all questions of a project."""
    files = sorted((root / PIPELINES).glob("*/*.yaml"))
    return [
        f"{file.parent.name}/{file.stem}"
        for file in files
        if file.parent.name not in (WORLDS, RESULTS) and file.name != PAPER_FILE
    ]


def load_questions(root: Path) -> list[QuestionFile]:
    """Return all questions of a project. Raises UserError where one is not in order."""
    return [QuestionFile(root, name) for name in list_question_names(root)]


def find_question(root: Path, name: str) -> QuestionFile:
    """Return the question ``name``: folder/file, or the file alone where one folder has it.

    Raises UserError with the new name of an old study, or with the closest names.
    """
    known = list_question_names(root)
    words = name.strip("/").removeprefix(f"{PIPELINES}/").removesuffix(".yaml")
    fitting = [one for one in known if one == words or one.partition("/")[2] == words]
    if words in known or len(fitting) == 1:
        return QuestionFile(root, words if words in known else fitting[0])
    if len(fitting) > 1:
        raise UserError(f"found {name!r}, which is {' or '.join(fitting)}; allowed: one of them")
    if old := find_old_study(root, words):
        raise UserError(f"found {name!r}, an old name; it is now: {old.command}")
    shown = ", ".join(known) or "none here; start from the folder that has pipelines/"
    raise UserError(f"found no question {name!r}{did_you_mean(words, known)}; allowed: {shown}")


def find_old_study(root: Path, name: str) -> Round | None:
    """Return the round that was the study ``name`` of moecore 0.2, if any was."""
    rounds = (one for question in load_questions(root) for one in question.rounds)
    return next((one for one in rounds if one.was == name), None)


def _move_run_keys(layer: Layer) -> Layer:
    """Return a layer of a question whose ``seeds`` and ``methods`` are also in ``run``."""
    sections = dict(layer.sections)
    run = sections.get("run", {})
    moved: dict[tuple, tuple[Document, tuple]] = {}
    methods = sections.get("methods")
    names = None
    if isinstance(methods, dict):
        names = tuple(methods)
    elif isinstance(methods, list) and all(isinstance(name, str) for name in methods):
        names = tuple(methods)
        del sections["methods"]
    added: dict[str, Any] = {}
    if names is not None:
        moved["run", "methods"] = layer.document, ("methods",)
        added["methods"] = [name for name in names if not _is_removed(methods, name)]
    data: Mapping[str, Any] = layer.document.data or {}
    if "seeds" in data:
        moved["run", "seeds"] = layer.document, ("seeds",)
        added["seeds"] = _expand_seeds(data["seeds"])
    if added and isinstance(run, dict):
        for key in run:
            moved.pop(("run", key), None)
        sections["run"] = added | run
    return layer._replace(sections=sections, names=names, moved={**layer.moved, **moved})


def _is_removed(methods: Any, name: str) -> bool:
    return isinstance(methods, dict) and methods[name] is None


def _expand_seeds(seeds: Any) -> Any:
    """``0-2`` as a list; everything else as it is: it is checked as run.seeds."""
    match = SEEDS.fullmatch(seeds) if isinstance(seeds, str) else None
    if match is None or int(match[2]) - int(match[1]) >= MAX_SEEDS:
        return seeds
    return list(range(int(match[1]), int(match[2]) + 1))


def _named_parts(document: Document, key: str) -> dict[str, Document]:
    """The entries of a mapping as documents of their own. UserError where it is no mapping."""
    parts = document.data.get(key) or {}
    if not isinstance(parts, dict):
        text = f"found {show_value(parts)}; allowed: {key} by their names"
        raise UserError(format_error_line(document, (key,), text))
    return {name: document.below(key).below(name) for name in parts}
