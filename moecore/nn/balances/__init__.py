"""Balancing without a loss: each balance shifts the scores that choose experts."""
