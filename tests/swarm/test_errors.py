import asyncio
import errno
import http.client
import socket
import ssl

import pytest
import torch
from safetensors import SafetensorError

from swarm.errors import ExitCode, UserError, of_machine, run_program, why
from swarm.memory_advice import memory_advice


def test_a_users_mistake_is_one_line_and_an_exit_code_of_its_kind(capsys):
    def main():
        raise UserError("The disk is full.", fix="Free some space.", code=ExitCode.DISK)

    assert run_program(main) == ExitCode.DISK
    assert capsys.readouterr().err == "error: The disk is full. Free some space.\n"


def test_debug_shows_where_it_came_from(capsys):
    def main():
        raise UserError("No.", fix="Yes.")

    run_program(main, debug=True)

    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_program(lambda: 1 // 0)


def test_a_program_that_returns_nothing_went_well():
    assert run_program(lambda: None) == 0
    assert run_program(lambda: 3) == 3


def test_ctrl_c_is_no_traceback(capsys):
    def main():
        raise KeyboardInterrupt

    assert run_program(main) == 130
    assert capsys.readouterr().err == "stopped.\n"


def test_what_the_machine_is_short_of_is_a_circumstance_of_its_kind():
    def too_much():
        torch.empty(1 << 50)

    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    def on_a_gpu():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")

    for main, code in ((too_much, ExitCode.MEMORY), (on_a_gpu, ExitCode.MEMORY), (full, ExitCode.DISK)):
        assert run_program(main) == code
    assert of_machine(MemoryError()).code == ExitCode.MEMORY and of_machine(MemoryError()).fix == memory_advice()
    assert str(of_machine(OSError(errno.ENOSPC, "No space left", "a.txt"))).startswith("No space left (a.txt).")
    assert str(of_machine(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))) == (
        "No space left on device. Free some space, then start again."
    )
    assert of_machine(SafetensorError("Error while deserializing header: header too large")) is None
    assert of_machine(OSError(errno.ENOENT, "No such file")) is None and of_machine(ValueError("1")) is None


class AcceleratorError(RuntimeError):
    """As newer versions of torch have one."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call."),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("HIP error: out of memory"),
        RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.27.5\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_a_gpu_that_is_full_is_short_of_memory_whoever_on_it_says_so(error):
    assert of_machine(error).code == ExitCode.MEMORY


def test_other_errors_of_a_gpu_are_no_want_of_memory():
    for said in ("CUDA error: an illegal memory access was encountered", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"):
        assert of_machine(AcceleratorError(said)) is None


class Wrapped(OSError):
    """As aiohttp wraps what asyncio raised."""

    os_error = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9099)")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Wrapped("Cannot connect to host 127.0.0.1:9099 ssl:default [...]"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "[SSL] record layer failure"), "[SSL] record layer failure"),
        (asyncio.TimeoutError(), "timed out"),
        (TimeoutError("the read timed out"), "the read timed out"),
        (http.client.RemoteDisconnected("gone"), "gone"),
        (ValueError(), "ValueError"),
    ],
)
def test_why_nobody_answered_is_told_in_the_systems_words(error, words):
    assert why(error) == words
