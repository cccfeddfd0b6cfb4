"""What is trained: one module per family."""
