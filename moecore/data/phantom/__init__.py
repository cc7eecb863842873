"""Simulated ageing heads: anatomy, its trajectories with age, scanners, and BIDS files of them."""
