"""The command ``python`` that DVC finds while a server of stages runs (see stage_fork_server.py).

``python -IS stage_client.py PYTHON WORD…``: a stage is asked of the server, all else is run
by PYTHON. Imports nothing but what starts in 20 ms.
"""

import ctypes
import json
import os
import signal
import socket
import sys

SOCKET = "MOECORE_SERVER"  # the environment variable that names the server's socket
PR_SET_PDEATHSIG = 1


def run_on_server(python: str, words: list[str]) -> int:
    """The exit code of the stage; a signal's number is negative, as the shell has it 128 + n."""
    is_stage = len(words) > 1 and words[0] == "-m" and words[1].startswith("moecore.stages.")
    if SOCKET not in os.environ or not is_stage:
        os.execv(python, [python, *words])
    # If DVC is killed this process is too, and then the server ends the stage.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = json.dumps([os.getcwd(), words[1:], dict(os.environ)])
    answers: list[str] = []  # the stage's process id, and at its end its exit code
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(os.environ[SOCKET])
            socket.send_fds(line, [b"."], [1, 2])
            line.sendall(f"{request}\n".encode())
            answers = line.makefile().readlines()
    except OSError:
        pass  # as without an answer
    if len(answers) < 2:
        print(
            f"{' '.join(words[1:])}: the server of stages has ended; start again", file=sys.stderr
        )
        return 1
    code = int(answers[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_on_server(sys.argv[1], sys.argv[2:]))
