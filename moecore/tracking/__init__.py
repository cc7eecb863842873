"""MLflow as a view of the histories on disk; the only importer of mlflow.

``history.jsonl`` (run/) → ``known`` (what the store has) → ``mirror`` (one history into one run)
→ ``study`` (all histories of a folder) → ``sync`` (all studies, once) or ``ui`` (again and again).
"""
