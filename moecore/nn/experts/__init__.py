"""Experts, all of a layer in one module: a family of parts (see base.py)."""
