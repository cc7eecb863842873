"""What writes params.yaml: what layers come to, and single values from the command line."""
