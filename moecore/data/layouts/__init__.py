"""How images, text and volumes lie in a prepared folder: one file each writes and opens them."""
