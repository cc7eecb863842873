"""A study: the whole of params.yaml as one typed object.

``stages`` is the table of stages, from which dvc.yaml and all lists of stages and phases follow.
``document``: YAML with the place of every key. ``settings``: what a stage reads, with errors by
place. ``sections``: run, claims and questions. ``study``: all sections. ``layers``, ``questions``:
a params.yaml composed of files. ``check``: whether settings, data and models fit each other; its
rules are in ``method_rules``, ``model_rules``, ``trial_rules``, ``data_rules``, ``training_rules``.
``params_file``: a params.yaml, written.
"""
