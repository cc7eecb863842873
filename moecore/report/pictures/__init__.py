"""Drawings that no declared chart covers: a file per measurement, with its ``PICTURES``."""
