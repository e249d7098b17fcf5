"""What a run writes down: its folder, records, log and partition."""
