"""A study: the whole of params.yaml as one typed object.

``stages`` is the table of stages, from which dvc.yaml and all lists of stages and phases follow.
``document``: YAML with the place of every key. ``settings``: what a stage reads, with errors by
place. ``sections``: run, claims and questions. ``study``: all sections. ``layers``, ``questions``:
a params.yaml composed of files. ``check``: whether settings, data and models fit each other:
``part_rules`` asks every part, ``section_rules`` and ``data_rules`` compare two sections,
``model_rules`` builds every model, ``trial_rules`` makes a step. ``params_file``: a params.yaml,
written.
"""
