"""Parts of blocks: attention, the mixture-of-experts layer, patches and windows."""
