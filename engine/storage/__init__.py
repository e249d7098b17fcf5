"""Files and object stores: atomic writes, locks, addresses."""
