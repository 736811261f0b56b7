"""Datasets: registration, upload, validation."""
