"""Scoring over HTTP: engines, batching, the server, and the host that serves what rows ask for."""
