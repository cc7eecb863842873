"""The life of a stage: from its command line to what it publishes.

``stage_entry`` starts it, ``training`` is one that trains, ``inputs`` compares what it read at its
checkpoints and at its end, ``source_hashes`` the code.
``histories``, ``history_file``, ``run_record``: the record of a run. ``resume``, ``locks``: what
survives a kill. ``partial_comparison``: part of a study. ``progress``: its bar.
``cluster_launcher``, ``local_ranks``: other machines, several ranks.
"""
