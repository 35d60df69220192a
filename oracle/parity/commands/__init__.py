"""The commands of the command line, a module each."""

EXIT_CODES = {"holds": 0, "differs": 1, "usage": 2, "cannot run": 3, "nothing compared": 5}
