"""File formats of prepared data: one module each to write and open images, text and volumes."""
