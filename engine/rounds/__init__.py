"""The driver: rounds, retries, divergence."""
