"""Pictures of single measurements in addition to columns and charts: ``PICTURES`` per file."""
