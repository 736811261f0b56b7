"""The training program: what torchrun starts, one process a rank. Knows no job, no queue and no database."""
