"""Who takes part in a round, and in which tasks."""
