"""A run from its launch to its result: its folder, its observers, a run that outlives its launcher."""
