"""One attempt at a round, and who takes part in it."""
