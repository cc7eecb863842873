"""Ways to an even load without a loss, one a file: each shifts what experts are chosen by."""
