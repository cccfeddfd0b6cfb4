"""The live page of a run: what it is served from, what it is told every second, and what it remembers. For a server's `/` and dd-monitor."""
