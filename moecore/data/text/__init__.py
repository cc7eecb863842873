"""Words, tokenizers of captions, and the base class of text sources."""
