"""The life of a stage: from its command line to what it publishes.

``stage`` starts it, ``training`` is one that trains, ``inputs`` compares at its end what it read.
``history``, ``history_file``: the record of a run. ``resume``, ``locks``: what survives a kill.
``partial_study``: part of a study. ``progress``: its bar. ``launch``, ``local_ranks``: other
machines, several ranks.
"""
