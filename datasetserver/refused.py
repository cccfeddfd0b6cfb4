"""How every rule of the server says no."""


class Refused(Exception):
    """A request that the rules do not allow; `status` is HTTP's."""

    def __init__(self, status: int, code: str, message: str, fix: str):
        super().__init__(message)
        self.status, self.code, self.message, self.fix = status, code, message, fix
