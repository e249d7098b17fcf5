"""`python -m fedfleet` is the command `fedfleet`, for environments whose scripts are not on the path."""

from .tune.main import main

main()
