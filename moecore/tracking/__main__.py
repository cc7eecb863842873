"""``python -m moecore.tracking sync | ui [--port 5000] | follow WORKING PUBLISHED --parent PID``."""

import argparse
import os
import sys
from pathlib import Path

from moecore.files import StageError
from moecore.tracking.follow import follow
from moecore.tracking.store import SILENT, uri
from moecore.tracking.sync import sync


def ui(port: int) -> None:
    """Import what is new, then become MLflow's server, for this machine only."""
    print_sync()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri(), "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    os.execve(sys.executable, command, os.environ | SILENT)


def print_sync() -> None:
    counts = sync()
    print(f"{uri()}: {counts.added} runs added, {counts.updated} updated, {counts.ended} ended; {counts.current} are current", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moecore.tracking", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sync", help="import all histories into MLflow")
    commands.add_parser("ui", help="import, then serve MLflow on 127.0.0.1").add_argument("--port", type=int, default=5000)
    following = commands.add_parser("follow", help="mirror a running stage (started by the stage itself)")
    following.add_argument("working", type=Path)
    following.add_argument("published", type=Path)
    following.add_argument("--parent", type=int, required=True)
    words = parser.parse_args()
    try:
        if words.command == "sync":
            print_sync()
        elif words.command == "ui":
            ui(words.port)
        else:
            follow(words.working, words.published, words.parent)
    except StageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
