"""Text: words, tokens and the streams that a language model is trained on."""
