"""Probes of frozen models: linear probes, simulated ageing and rescans, tissues and cubes."""
