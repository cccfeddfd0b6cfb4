"""States and means: kept on disk, handed to others, fetched from them."""
