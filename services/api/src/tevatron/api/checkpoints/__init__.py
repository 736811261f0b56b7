"""Checkpoints: what jobs have published."""
