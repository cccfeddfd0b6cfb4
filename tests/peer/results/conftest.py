"""For all tests of this room: a tiny model's folder is read once, and the collector passes over the libraries."""

from tests.peer.frozen import libraries_are_frozen  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
