"""What checks, before anything runs.

``validate`` is about the file alone: sections, and ``*_misfits`` that compare sections.
``preflight`` adds the data (``data_rules``) and builds every model without memory
(``model_misfits``). A rule yields keys and what is wrong; no rule reads the file.
"""
