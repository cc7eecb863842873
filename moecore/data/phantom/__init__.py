"""Simulation of MRI scans of ageing heads, by two generators with different anatomy."""
