"""Files of a prepared folder: one module each writes and opens images, text and volumes."""
