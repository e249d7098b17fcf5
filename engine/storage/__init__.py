"""Files and object stores: atomic writes, locks, digests, addresses."""
