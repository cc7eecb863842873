import os

if "MOECORE_CLUSTER" in os.environ:
    # Before torch is imported: this process may only start the stage elsewhere.
    from moecore.run.launch import hand_over

    hand_over()
