"""Data sources, which write the prepared layout: a family of parts (see base.py)."""
