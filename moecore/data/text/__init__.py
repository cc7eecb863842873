"""Text: words, tokens, captions, and the streams that a language model is trained on."""
