"""Streams between peers, and the signed records by which they find each other."""
