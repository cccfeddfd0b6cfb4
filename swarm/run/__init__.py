"""What all peers agree on, each fact where it belongs: a family's in families/NAME.py, and so on. No torch here."""
