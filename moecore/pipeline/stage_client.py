"""The ``python`` that DVC starts: it lets a server of stages run the stage (stage_fork_server.py).

``python -IS stage_client.py PYTHON WORD…``: the server runs a stage, PYTHON everything else. It
imports only modules that load in 20 ms.
"""

import ctypes
import json
import os
import signal
import socket
import sys

SOCKET_ENV = "MOECORE_SERVER"  # the environment variable that names the server's socket
PR_SET_PDEATHSIG = 1


def run_on_server(python: str, arguments: list[str]) -> int:
    """Run a stage on the fork server, if there is one; exec all else; return the exit code."""
    parts = [*arguments, "", ""]
    is_stage = parts[0] == "-m" and parts[1].startswith("moecore.stages.")
    if SOCKET_ENV not in os.environ or not is_stage:
        os.execv(python, [python, *arguments])
    # If DVC is killed this process is too, and then the server ends the stage.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = json.dumps([os.getcwd(), arguments[1:], dict(os.environ)])
    answers: list[str] = []  # the stage's process id, and at its end its exit code
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(os.environ[SOCKET_ENV])
            socket.send_fds(line, [b"."], [1, 2])
            line.sendall(f"{request}\n".encode())
            answers = line.makefile().readlines()
    except OSError:
        pass  # reported below
    if len(answers) < 2:
        stage = " ".join(arguments[1:])
        print(f"{stage}: the server of stages has ended; start again", file=sys.stderr)
        return 1
    code = int(answers[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_on_server(sys.argv[1], sys.argv[2:]))
