"""Postgres, the truth: tables, repositories, claims and migrations."""
