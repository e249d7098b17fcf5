"""The fleet: what the clients' devices are like, when they are online, and how long a visit of a client takes."""
