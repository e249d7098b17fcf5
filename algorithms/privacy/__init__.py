"""Client-level differential privacy: bounded messages, and noise on their sum. It is simulated, see docs/privacy.md."""
