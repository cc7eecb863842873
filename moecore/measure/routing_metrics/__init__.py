"""Metrics of routing records: load, agreement of views and epochs, similarity, galleries."""
