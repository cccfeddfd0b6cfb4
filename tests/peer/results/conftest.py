"""For all tests of this room: a tiny model's folder is read once, UNets have one level, and the collector passes over the libraries."""

import pytest

from tests.peer.frozen import libraries_are_frozen  # noqa: F401
from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401


@pytest.fixture(scope="session")
def tiny_family(shallow_family):  # noqa: F811
    """In the place of the other: where the layers' names are what matters, models have as many blocks as real ones (`test_results.real_blocks`)."""
    return shallow_family
