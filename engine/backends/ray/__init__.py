"""Workers, nodes and the driver as actors of Ray."""
