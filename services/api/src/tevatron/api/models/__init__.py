"""Base models: registration with checks."""
