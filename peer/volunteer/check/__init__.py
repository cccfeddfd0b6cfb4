"""`dd-peer --check URL`: what works between this machine and a run, before anything is trained."""
