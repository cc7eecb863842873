"""Curves over epsilon, and the audit of whether attacks were strong enough."""
