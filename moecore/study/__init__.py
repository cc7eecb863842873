"""A study: all of params.yaml as one typed object.

``stages``: the table of stages, from which dvc.yaml and all lists of stages and phases follow.
``document``: YAML with the place of every key. ``settings``: a stage's settings, with errors by
place. ``sections``: run, claims and questions. ``study``: all sections. ``layers``, ``questions``,
``papers``: a params.yaml composed of files. ``check``: whether settings, data and models fit
together; ``part_rules`` calls every part's checks and compares sections, ``model_rules`` compares
data and builds every model, ``trial_rules`` runs a step. ``params_file``: writes a params.yaml.
"""
