"""Words, tokenizers of captions, and what sources of text share."""
