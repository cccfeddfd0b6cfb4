from tests.peer.machine.shallow import tiny_model  # noqa: F401
