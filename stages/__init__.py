import os
import sys

from moecore.core.files import set_parent_death_signal

if __name__ == "stages":
    raise ImportError("stages are modules of moecore: python -m moecore.stages.…")

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith(f"{__name__}."):
    # As early as possible: importing torch takes seconds, in which the parent may die.
    set_parent_death_signal()

if os.environ.keys() & {"MOECORE_LAUNCH", "MOECORE_RANKS"}:
    # Before torch is imported: this process may only start the stage elsewhere.
    from moecore.run.launcher import hand_stage_to_launcher

    hand_stage_to_launcher()
