"""What the section `privacy` means for a run: bounds, noise, and epsilon after every round."""
