"""Messages of a round as rows of files, and what workers compute from them: Gram matrices, sums, columns."""
