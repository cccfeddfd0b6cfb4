"""Which tensors are trained: one module per method."""
