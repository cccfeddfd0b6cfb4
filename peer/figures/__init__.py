"""A peer's figures and to whom they are shown."""
