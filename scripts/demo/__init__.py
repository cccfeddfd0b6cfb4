"""What `./scripts/quickstart` runs: real digits, a tiny Stable Diffusion, a swarm on this machine, and a judge of the result."""
