"""The host's program: checks a folder of captioned pictures, serves it as shards, leases them to peers and keeps the ledger.

`python -m datasetserver --dataset DIR --model DIR`. Needs neither torch nor hivemind, except for announcing the run in the DHT.
"""
