"""Contracts of parts."""
