"""Attacks on images: a family of parts (see base.py)."""
