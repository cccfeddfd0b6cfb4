"""What every program of distributed-diffusion shares: errors, logs, configuration, the DHT, signed records, the wire protocol.

Imports nothing from `peer` or `datasetserver`. Only `daemon.py`, `dht*.py`, `identity.py`, `maddrs.py`, `places.py`,
`ports.py` and `reachability.py` import hivemind, and none of them torch.
"""

from swarm.lazy_hub import import_without_hub

# A DHT node needs neither hivemind's optimizers nor its experts, and not scipy and torch with them: a quarter of its start, 55 MB for 250.
import_without_hub("hivemind")
import_without_hub("hivemind.dht")
_homes = {"MSGPackSerializer": "serializer", "SerializerBase": "serializer", "get_logger": "logging", "get_dht_time": "timed_storage"}
import_without_hub("hivemind.utils", **_homes)
