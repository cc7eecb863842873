"""Simulated ageing heads: anatomy, its changes with age, scanners, and a second generator."""
