"""What this machine can do, and how fast: devices, precision, kernels, disk."""
