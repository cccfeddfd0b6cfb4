from tests.peer.machine.shallow import tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
