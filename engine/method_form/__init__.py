"""What the engine needs to know of a method: the shapes of its states. Also BatchNorm statistics outside of methods."""
