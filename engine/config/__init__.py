"""What an experiment is, as data: its settings, schedules and parts by name, and what they must not be."""
