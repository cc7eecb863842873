"""Who sends which token to which expert: a family of parts, each a file (see base.py)."""
