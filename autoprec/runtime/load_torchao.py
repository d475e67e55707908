"""Importing torchao where it is used, and quietly: a training job that does not use it need not have it."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from autoprec.errors import ApplyError

# torchao logs each of its libraries that does not fit this Python or device, and torch that torchao registers an Enum.
_CHATTY = ("torchao", "torch.utils._pytree")


def load_torchao(module: str, needed_for: str) -> ModuleType:
    """Return the torchao module of that name, imported without what it logs and warns about by itself.

    Raises: `ApplyError` that says how to install it if it is missing or does not fit this torch.
    """
    try:
        with _quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise ApplyError(
            f"{needed_for} needs {module}, which cannot be imported ({error}); pip install torchao"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what is logged by these loggers and warned during the block; afterwards all is as the user set it."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    found = [logger.disabled for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, disabled in zip(loggers, found, strict=True):
                logger.disabled = disabled
