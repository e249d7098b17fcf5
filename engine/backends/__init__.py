"""What runs a round's tasks: this process, or workers on Ray."""
