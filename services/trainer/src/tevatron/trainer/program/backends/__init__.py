"""The training backends. Each keeps its own loop; data, losses, states and export are shared."""
