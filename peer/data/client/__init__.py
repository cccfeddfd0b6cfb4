"""What the source that leases from a dataset server is made of; `peer.data.dataset_server` puts it together."""
