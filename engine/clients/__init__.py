"""What a worker does for a client: states, batches, local training, evaluation."""
