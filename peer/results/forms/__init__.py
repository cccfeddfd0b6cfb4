"""Forms of a result, one file each."""
