"""The training data: checked as a whole before the model loads, then drawn group by group."""
