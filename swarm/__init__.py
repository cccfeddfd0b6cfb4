"""What every program of distributed-diffusion shares: errors, logs, configuration, the DHT, signed records, the wire protocol.

Imports nothing from `peer` or `datasetserver`. Only `dht.py` and `records.py` import hivemind (and with it torch).
"""

from swarm.lazy_hub import import_without_hub

# A DHT node needs neither hivemind's optimizers nor its experts, and not scipy with them: a quarter of a sidecar's start.
import_without_hub("hivemind")
