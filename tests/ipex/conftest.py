"""For scripts/test_ipex, whose environment has IPEX: elsewhere nothing here is collected. Importing IPEX with another PyTorch ends the process."""

import importlib.util

if importlib.util.find_spec("intel_extension_for_pytorch") is None:
    collect_ignore_glob = ["test_*.py"]
