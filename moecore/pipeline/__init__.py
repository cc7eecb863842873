"""Runs a project through DVC: what has to run, and several stages at a time.

``cli`` is the command ``moecore``. ``code_hashes``, ``closures``: which source decides a result.
``plan``: what would run, and why. ``parallel``, ``places``, ``drivers``: DVC's processes side by
side, one driver a project. ``forked``, ``client``: stages without their seconds of imports.
``studies``, ``dvc_file``: the folders under pipelines/. ``scale``: a training on paper.
"""
