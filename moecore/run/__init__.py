"""Run a stage, from its command line to its published record.

``stage_entry`` starts any stage; ``training`` and ``measurement_run`` are the work of some.
``inputs`` compares settings, code and artifacts at checkpoints and at the end. ``history_file`` and
``run_record`` record a run, and continue a killed one. ``progress`` shows a bar. ``launch`` and
``local_ranks`` start stages on other machines, or as several ranks.
"""
