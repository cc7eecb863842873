"""The life of a stage: from its command line to what it publishes.

``stage_entry`` starts it, ``training`` is one that trains, ``expert_reduction_run`` one that prunes
or merges. ``inputs``: settings, code and artifacts that it read, compared at its checkpoints and at
its end. ``history_file``, ``run_record``: the record of a run, and those of a study. ``resume``:
what survives a kill. ``partial_comparison``: part of a study. ``progress``: its bar.
``launch``, ``local_ranks``: other machines, several ranks.
"""
