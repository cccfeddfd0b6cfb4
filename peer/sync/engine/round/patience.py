"""How long a round waits for its slower peers."""

_SHARE, _SHORTEST_SECONDS = 0.25, 1.0
"""A round waits for a slow peer's step for a quarter of the time that it has taken already."""


def patience_seconds(age_seconds: float, failures: int = 0) -> float:
    """How long a peer whose round has taken `age_seconds` so far waits for a slower one; each failure doubles it."""
    return max(_SHORTEST_SECONDS, _SHARE * age_seconds) * 2 ** min(failures, 5)
