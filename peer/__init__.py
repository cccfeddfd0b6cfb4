"""The training daemon. `finetune.py` is the entry and the only wiring; every room offers modules behind `contracts.py`."""
