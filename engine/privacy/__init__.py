"""What a private run is: its bounds and noise (privacy_plan), and epsilon after each round (accounting)."""
