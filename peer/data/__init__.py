"""Where samples come from: one module per source."""
