"""Retrieves, reranks through scorers, computes retrieval metrics; never imports torch."""
