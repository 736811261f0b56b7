"""Readers and writers of the files that people have; every error names file, line and field."""
