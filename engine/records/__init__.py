"""The records of a run: numbers per round and per client, events, columns and the partition."""
