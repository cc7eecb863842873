"""One driver in a project at a time, and its DVC processes, which end when it does."""

import fcntl
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml
from ruamel.yaml.resolver import implicit_resolvers

from moecore.core.files import UserError, explain_full_disk, whole_text
from moecore.run.stage import end_with_parent

BUSY = "rwlock"  # in DVC's folder: which process reads or writes which files
HELD = Path(".state/driver.json")  # who drives, since when


@contextmanager
def alone(path: Path = HELD) -> Iterator[None]:
    """Hold the project while its stages are run.

    Raises UserError that says who does, since when, and what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open(path, "a+", encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be written, {why}; mend that") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path.parent}: {_who(path)}") from None
        who = json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        with explain_full_disk(path):
            file.truncate(0)
            file.write(who)
            file.flush()
        yield


def _who(path: Path) -> str:
    mend = "wait for it, or end it and start again"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        who = f"process {found['pid']} has been running the stages of this folder since "
        return f"{who}{found['since']}; {mend} (`kill {found['pid']}`)"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return f"another process is running the stages of this folder; {mend}"


def dvc(*words: str) -> list[str]:
    """The command line of a DVC process that ends with the one that starts it."""
    return [sys.executable, "-m", "moecore.pipeline.drivers", *words]


def free(repo: Any) -> None:
    """Remove from DVC's list of busy files what killed processes left in it; ``repo`` is its Repo.

    DVC itself drops those whose number no process has, but another one may have got it since. And
    it empties the list before it writes it: a kill in between leaves one that no DVC goes on with.
    """
    from dvc.rwlock import RWLockFileCorruptedError, _edit_rwlock

    busy = Path(repo.tmp_dir, BUSY)
    if not busy.exists():
        return
    hardlink = repo.config["core"].get("hardlink_lock", False)
    try:
        with _edit_rwlock(repo.tmp_dir, repo.fs, hardlink) as found:  # nobody writes it meanwhile
            written, read = found["write"], found["read"]
            for path in [path for path, one in written.items() if not _holds(one)]:
                del written[path]
            for path in list(read):
                read[path] = [one for one in read[path] if _holds(one)]
    except RWLockFileCorruptedError:
        busy.unlink(missing_ok=True)
        print(f"{busy}: damaged, as DVC leaves it when it is killed; removed", file=sys.stderr)


def _holds(entry: Mapping[str, Any]) -> bool:
    """Whether the process that an entry names is the one that wrote it, and no later one."""
    try:
        words = psutil.Process(entry["pid"]).cmdline()
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, KeyError):
        return False
    return bool(words) and entry["cmd"].endswith(words[-1])


def lock_whole() -> None:
    """Let DVC of this process write its lock file whole or not at all, and fifteen times as fast.

    By itself it empties the file first, so that a full disk or a kill loses what all stages ran
    with; and around each stage it reads and writes the file with comments in mind, which it has
    none: 6 s where 800 stages ran. What it reads back is the same.
    """
    from dvc import dvcfile
    from dvc.utils.serialize import _common, _yaml, modify_yaml

    reader, writer = _yaml_1_2()

    def dump(path: str, data: Any, dumper: Callable[..., Any], **words: Any) -> None:
        words.pop("fs", None)  # the local one
        with whole_text(path) as file:
            dumper(data, file, **words)

    @contextmanager
    def modify(path: str, fs: Any = None) -> Iterator[Any]:
        if Path(path).name != dvcfile.LOCK_FILE:
            with modify_yaml(path, fs=fs) as data:
                yield data
            return
        data = _common._load_data(path, parser=parse, fs=fs) if os.path.exists(path) else {}
        yield data
        dump(path, data, yaml.dump, Dumper=writer, sort_keys=False, allow_unicode=True)

    def parse(text: Any, path: Any) -> Any:
        try:
            return yaml.load(text, Loader=reader) or {}
        except yaml.YAMLError:
            raise _yaml.YAMLFileCorruptedError(path) from None

    _common._dump_data = dump  # type: ignore[assignment]
    dvcfile.modify_yaml = modify  # type: ignore[assignment]


def _yaml_1_2() -> tuple[type[yaml.CSafeLoader], type[yaml.CSafeDumper]]:
    """YAML as DVC reads and writes it: ``1e-05`` is a number, ``off`` a word, None nothing."""

    class Loader(yaml.CSafeLoader):
        def number(self, node: yaml.ScalarNode) -> int:
            """``010`` is ten."""
            digits = self.construct_scalar(node).replace("_", "")
            return int(digits, 0 if re.match("[-+]?0[box]", digits) else 10)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            """A key that is there twice is refused: a merge of two commits left both."""
            keys = [(key.tag, str(key.value)) for key, _ in node.value]
            if len(set(keys)) != len(keys):
                raise yaml.constructor.ConstructorError(None, None, "a key is there twice")
            return super().construct_mapping(node, deep)

    class Dumper(yaml.CSafeDumper):
        def represent_nothing(self, _: None) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:null", "")

        def represent_number(self, value: float) -> yaml.ScalarNode:
            said = repr(float(value))
            if not math.isfinite(value):  # inf, -inf, nan
                said = said.replace("inf", ".inf").replace("nan", ".nan")
            return self.represent_scalar("tag:yaml.org,2002:float", said)

    Dumper.add_representer(type(None), Dumper.represent_nothing)
    Dumper.add_representer(float, Dumper.represent_number)
    Dumper.add_multi_representer(dict, Dumper.represent_dict)  # OrderedDict is one
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.number)
    for kind in (Loader, Dumper):
        kind.yaml_implicit_resolvers = {}
        for versions, tag, form, first in implicit_resolvers:
            if (1, 2) in versions:
                kind.add_implicit_resolver(tag, form, first)
    return Loader, Dumper


if __name__ == "__main__":
    end_with_parent()
    from dvc.cli import main  # a second, that those who import this file do not need

    lock_whole()
    sys.exit(main(sys.argv[1:]))
