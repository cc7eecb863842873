"""Calibrators of predictions: a family of parts (see base.py)."""
