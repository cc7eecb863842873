"""Runs a project through DVC: what has to run, and several stages at a time.

``cli`` is the command ``moecore``, ``predict_cli`` its part with a process of its own. ``dvc``: the
dvc.yaml of studies, from the table of stages. ``code_hashes``: which source decides a result.
``plan``: what would run, and why. ``parallel``: DVC's processes side by side, and where they run.
``stage_fork_server``, ``stage_client``: stages without their imports. ``study_runs``: the folders
in which questions run. ``project``: one driver a project; ``project_files``: a project of one's
own, from project_template/ and shipped/. ``pilot``: whether a setting is worth a study.
"""
