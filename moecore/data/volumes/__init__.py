"""Volumes of heads: tables of a cohort, NIfTI files, one grid, checks, and what is stored."""
