"""What blocks are made of: attention, the mixture-of-experts layer, patches, windows, and
the form of a trained layer whose Lipschitz constant has a bound.
"""
