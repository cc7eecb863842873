"""MLflow as a view of the histories on disk; the only importer of mlflow.

``history.jsonl`` (run/) → ``known`` (what the store has) → ``mirror`` (one history into one run,
called by ``names``) → ``parents`` (one run a method and seed, with the ``headline`` numbers of its
stages) → ``study`` (all histories of a folder) → ``sync`` (all studies, once) or ``ui`` (again and
again, beside ``pages``). ``model`` logs and registers trained models, and finds them again.
``database`` says what is wrong with MLflow's file, ``answers`` what is wrong with a server.
"""
