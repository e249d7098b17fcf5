"""Rules that take the place of the mean of the clients' messages, and what may stand before and after them."""
