"""Importing an oracle: whether it is absent, or there and broken."""

import contextlib
from collections.abc import Iterator

from qwen35.errors import CannotRunError

_INSTALL = "pip install 'qwen35-parity[oracles]'"


@contextlib.contextmanager
def importing(*packages: str) -> Iterator[None]:
    """Turn a failed import into CannotRunError that tells an absent package from a broken one.

    `packages` are what the block imports, as pip names them.
    """
    try:
        yield
    except ImportError as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        for package in packages:
            if absent == package.replace("-", "_"):
                raise CannotRunError(
                    f"{package} is not installed. Install it: {_INSTALL}"
                ) from None
        what = " or ".join(packages)
        raise CannotRunError(
            f"{what} is installed but cannot be imported: {type(error).__name__}: {error}. Mend "
            f"what it says, or install all of it again in a fresh environment: {_INSTALL}"
        ) from None
