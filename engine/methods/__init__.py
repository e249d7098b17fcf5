"""What the engine asks of a method: the shapes of its states, and running statistics beside it."""
