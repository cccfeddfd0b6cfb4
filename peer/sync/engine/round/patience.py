"""How long a round waits for its slower peers."""

_SHARE, _SHORTEST_SECONDS = 0.25, 1.0
"""A round that took so long already may wait for a quarter of that until a slow peer's step is done."""


def patience_seconds(age_seconds: float, failures: int = 0) -> float:
    """How long a peer whose round has taken `age_seconds` so far waits for a slower one; each failure doubles it."""
    return max(_SHORTEST_SECONDS, _SHARE * age_seconds) * 2 ** min(failures, 5)
