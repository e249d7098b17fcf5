"""Problems whose solution is known, and min-max problems."""
