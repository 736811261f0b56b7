"""Evaluations and their values."""
