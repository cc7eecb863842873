"""The report's page and the routing explorer."""
