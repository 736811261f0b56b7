"""The scorer host: claims scorers, serves each with a child process, and lets them go. Never imports torch."""
