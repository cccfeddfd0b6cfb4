"""`--ipex`: the kernels of Intel's extension for PyTorch 2.8, the last there is, in place of PyTorch's own.

They take the place of PyTorch's in the moment of the import, and for good. `ipex.optimize()` is not called: with `dtype=torch.bfloat16` it makes bf16
of the parameters, and with float32 it packs the convolutions' weights into blocks of its own (or, without packing, does nothing more than the
import): the swarm, checkpoints and the optimizer need the very float32 tensors that there were.
"""

import importlib
import importlib.util
import warnings

import torch

from swarm.errors import UserError

_PACKAGE = "intel_extension_for_pytorch"
_FIX = "scripts/test_ipex makes an environment that has it: start this peer with that one's Python; or remove --ipex."


def check_ipex(device: torch.device) -> None:
    """Raise UserError where it cannot be used. Nothing is imported yet: with another PyTorch the import would end the process."""
    if device.type != "cpu":
        raise UserError(f"--ipex is for a CPU, and this peer computes on {device}.", fix="Remove --ipex, or add --device cpu.")
    if importlib.util.find_spec(_PACKAGE) is None:
        raise UserError("--ipex needs Intel's extension for PyTorch, which is not installed.", fix=_FIX)
    if not torch.__version__.startswith("2.8."):
        raise UserError(f"--ipex needs PyTorch 2.8, and this is {torch.__version__}.", fix=_FIX)


class Ipex:
    """A way for `peer.machine.trial_of_speed`."""

    name = "IPEX"

    def on(self) -> None:
        try:
            importlib.import_module(_PACKAGE)
        except (ImportError, OSError, AssertionError) as error:
            raise UserError(f"Intel's extension for PyTorch cannot be imported ({str(error).splitlines()[0][:200]}).", fix=_FIX) from error
        # It registers norms without saying how to differentiate them, of which PyTorch warns; that it can all the same is what the trial sees.
        warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered", category=UserWarning)

    def off(self) -> None:
        raise UserError("IPEX cannot be switched off once it is imported.", fix="Start again without --ipex.")
