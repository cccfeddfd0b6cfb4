"""The training process and its sidecar: both sides of their conversation."""
