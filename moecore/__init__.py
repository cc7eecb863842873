"""moecore: sparse vision mixture-of-experts models, their training, and everything the papers
measure on them.
"""
