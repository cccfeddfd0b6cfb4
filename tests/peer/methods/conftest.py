"""For all tests of this room: the collector passes over the libraries."""

from tests.peer.frozen import libraries_are_frozen  # noqa: F401
