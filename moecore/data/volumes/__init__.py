"""Volumes of heads: tables of participants, and preparation of NIfTI files."""
