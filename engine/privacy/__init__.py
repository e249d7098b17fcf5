"""What the rounds of a private run cost: epsilon after every round, and the noise that a target allows."""
