"""One module per training method: its METHOD says all that is to know of it without tensors, its options included. peer/methods has the rest."""
