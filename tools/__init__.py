"""Programs that maintain the repository. They are not part of the package that is installed."""
