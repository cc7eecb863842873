"""Intervals, paired and crossed comparisons, corrections for several tests; of numbers alone."""
