"""What writes params.yaml: a study's from its overlay, and single values from the command line."""
