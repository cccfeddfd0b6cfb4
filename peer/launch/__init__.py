"""From a command to a run: flags, which run this peer is in, which weights it starts from."""
