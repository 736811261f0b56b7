"""The `tevatron` command, the client of the API, and the embedded stack."""
