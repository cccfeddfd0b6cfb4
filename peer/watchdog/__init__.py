"""What dd-peer does to keep a trainer alive."""
