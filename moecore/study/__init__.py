"""A study: all of params.yaml as one typed object."""
