"""Routers, which decide which token goes to which expert: a family of parts (see base.py)."""
