"""Scorers as a desired state."""
