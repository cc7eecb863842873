"""Intervals, paired and crossed comparisons, corrections for several tests; on arrays only."""
