"""Data sources: a family of parts that write prepared folders (see base.py)."""
