"""Schemas that cross a process border: jobs, checkpoints, resources, the score API."""
