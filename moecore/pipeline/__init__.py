"""Run a project through DVC: what has to run, and several stages at a time.

``cli``: the command ``moecore``; ``predict_cli``: its part in a separate process. ``dvc``: the
dvc.yaml of studies, from the table of stages. ``code_hashes``: which source decides a result.
``plan``: what would run, and why. ``parallel``: parallel DVC processes, and their devices.
``stage_fork_server``, ``stage_client``: stages without their imports. ``study_runs``: the folders
in which questions run. ``project``: one driver per project; ``project_files``: a user's project,
from project_template/ and shipped/. ``pilot``: whether a setting is worth a study.
"""
