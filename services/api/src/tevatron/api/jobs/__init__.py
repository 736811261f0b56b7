"""Jobs: submission, lists, events, log."""
