"""The errors a user can mend: each says where, what was found, what was due, and the remedy."""


class InputError(Exception):
    """Bad input: a file, an option or a program that cannot be used as it is (exit code 2)."""


class CheckpointError(InputError):
    """A checkpoint that cannot be used; the message begins with the file it speaks of."""

    def __init__(self, path: object, problem: str, remedy: str):
        super().__init__(f"{path}: {problem}. {remedy}.")


class CannotRunError(Exception):
    """Something outside the input is missing: an oracle, a device, the network (exit code 3)."""


class CacheError(InputError):
    """What was asked of a cache cannot be done; unless the message says so, nothing has changed."""
