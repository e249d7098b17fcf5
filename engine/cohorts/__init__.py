"""Which clients take part in a round, and how the cohort is divided into blocks and tasks."""
