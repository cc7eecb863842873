"""Probes of frozen models: linear probes, and tests of brain-age models on simulated people."""
