"""One module per model family: its FAMILY says all that is to know of it without its tensors. Those are in the module of peer/models of the same name."""
