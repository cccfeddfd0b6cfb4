"""What every program of distributed-diffusion shares: errors, logs, configuration, the DHT, signed records, the wire protocol.

Imports nothing from `peer` or `datasetserver`. Only `dht.py` and `records.py` import hivemind (and with it torch).
"""
