from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
