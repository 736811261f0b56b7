"""Webhooks: the ends of jobs, told to whoever asked."""
