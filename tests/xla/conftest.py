"""Four devices of XLA's in this process, and in all that it starts: parts of the CPU, that behave as chips do."""

import os

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
# Compiling takes nearly all of the tests' time, and what is compiled runs a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
