"""The embedded stack: Postgres, Valkey and our services as children of one foreground process."""
