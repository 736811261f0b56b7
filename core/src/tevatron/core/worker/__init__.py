"""What every worker shares: the Celery wake-up and one claimed job's life."""
