"""How peers agree: one module per strategy; the machinery they share is in `engine`."""
