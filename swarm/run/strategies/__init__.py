"""One module per way to agree: its STRATEGY, and its options. peer/sync has what it does."""
