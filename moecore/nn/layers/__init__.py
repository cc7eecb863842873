"""What blocks are made of: attention, the mixture-of-experts layer, patches and windows."""
