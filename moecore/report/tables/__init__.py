"""Tables of numbers with intervals: methods by metric, and the papers' numbers."""
