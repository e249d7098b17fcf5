"""What an experiment is: settings, schedules, parts by name, and the run that follows from them."""
