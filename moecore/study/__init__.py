"""A study: the whole of params.yaml as one typed object.

``reading`` parses files and gives settings with the place of every key, ``checking`` says whether
the settings, the data and the models fit each other, ``writing`` changes params.yaml. ``stages`` is
the table of stages, from which dvc.yaml and all lists of stages and phases follow.
"""
