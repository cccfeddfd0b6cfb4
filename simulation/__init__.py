"""Real peers in a simulated world: virtual time, a modelled network, disks that tear, processes that die; one seed repeats it all.

Real: the replica and all it is made of, the sidecar's loop, the trainer's side (`SwarmSync`), its work and accounts. Modelled: p2pd, the DHT,
sockets, disks, processes, and the model that is trained (a vector of a few hundred floats). docs/internals.md says how to use it.
"""
