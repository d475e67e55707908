"""torchao is imported quietly, and its absence is said."""

import logging
import subprocess
import sys
import warnings

import pytest

from autoprec.errors import ApplyError
from autoprec.runtime.load_torchao import load_torchao


def test_what_is_missing_is_said_with_what_to_do() -> None:
    message = r"a rule needs torchao.no_such_module, which cannot be imported .*; pip install torchao"
    with pytest.raises(ApplyError, match=message):
        load_torchao("torchao.no_such_module", "a rule")


def test_loggers_and_warnings_are_the_users_again() -> None:
    logger = logging.getLogger("torchao")
    logger.disabled = True
    try:
        load_torchao("torchao.float8", "a rule")
        assert logger.disabled
    finally:
        logger.disabled = False
    load_torchao("torchao.float8", "a rule")
    assert not logger.disabled
    with pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)


@pytest.mark.long  # what it prints changes with a release of torchao
def test_the_import_prints_nothing() -> None:
    script = 'from autoprec.runtime.load_torchao import load_torchao; load_torchao("torchao.float8.float8_linear", "x")'
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
