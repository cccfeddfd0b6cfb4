"""What libraries have made of themselves is left out of the collector's rounds: half a million objects, 0.4 s each time it looks through all."""

import gc
import sys

import pytest

_FEW = 100
"""Modules more than when it was last done, for which it is not done again."""
_modules = 0


@pytest.fixture(autouse=True)
def libraries_are_frozen():
    """For all tests of the room whose conftest imports it."""
    global _modules
    if len(sys.modules) > _modules + _FEW:
        gc.collect()  # garbage would stay for ever
        gc.freeze()
        _modules = len(sys.modules)
