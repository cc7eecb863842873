"""Foundations that all other rooms use; this room imports none of them."""
