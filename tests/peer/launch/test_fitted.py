"""`--fit auto` and `--blocks_to_swap auto`: options are counted at the start, and advised where memory ran out."""

import logging

import pytest
import torch

from peer.config import PeerConfig
from peer.finetune import main
from peer.launch import fitted as room
from peer.launch.command_line import parse
from peer.launch.fitted import advised, checked, fitted
from peer.launch.joining import Joined
from peer.launch.launcher import Rank
from peer.launch.stopping import Stop
from peer.machine.fitting import Fit, fit
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from tests import tiny

CPU, CUDA, ALONE = torch.device("cpu"), torch.device("cuda"), Rank()
JOINED = Joined(RunConfig(method="lora", family="flux", sync="none"))
FITS = Fit({"offload": True, "train_batch_size": 2}, 9e9, 14e9, 11e9)
TOO_MUCH = Fit({"offload": True}, 19e9, 24e9, 11e9)


@pytest.fixture
def count(monkeypatch):
    """`count(what)`: what is counted, or raised."""

    def counted(what):
        def answer(*_):
            if isinstance(what, Exception):
                raise what
            return what

        monkeypatch.setattr(room, "counted", answer)

    return counted


@pytest.fixture
def train(tiny_model, tmp_path, monkeypatch, capsys):
    """`train(*flags)`: the exit code and the log of a real run on a CPU."""
    monkeypatch.setattr(Stop, "listen", lambda self: self)  # the signals are pytest's
    tiny.write_pictures(tmp_path / "pictures", 2)

    def trained(*flags):
        common = ["--model", tiny_model, "--train_data_dir", tmp_path / "pictures", "--output_dir", tmp_path / "out", "--resolution", 16]
        try:
            code = main([*map(str, common), "--method", "lora", "--max_train_steps", "1", "--device", "cpu", *flags])
        except UserError as error:
            return error.code, str(error)
        return code, capsys.readouterr().err

    return trained


def test_options_are_taken_when_a_run_starts_and_one_line_says_which_and_why(train, monkeypatch):
    short = lambda run, peer, device, needs, there, ways: fit(run, peer, device, needs, needs.of(peer) - 1, ways)  # noqa: E731
    monkeypatch.setattr(room, "fit", short)
    code, said = train("--fit", "auto", "--train_batch_size", "2")
    assert code == ExitCode.OK and said.count("options that fit, by --fit auto:") == 1 and "finished samples=2" in said
    assert " are needed with --train_batch_size 1 --gradient_accumulation_steps 2, " in said
    assert "base_precision=" not in said, "options that were counted and not taken"


def test_a_run_that_cannot_fit_is_refused_before_it_begins(train, monkeypatch):
    monkeypatch.setattr(room, "free_on_host", lambda peer, run, params: 1e5)
    code, said = train("--fit", "auto")
    assert code == ExitCode.MEMORY and "no options of this machine make it fit. Use a GPU of 4 GB or more" in said


def test_a_peer_that_computes_on_its_cpu_swaps_no_blocks(count, caplog):
    count(ValueError("not asked"))
    peer = fitted(PeerConfig(blocks_to_swap=None, swap_to="disk"), JOINED, {}, CPU, ALONE)
    assert peer.blocks_to_swap == 0 and "blocks_to_swap=0: it makes room on a GPU" in caplog.text
    assert fitted(given := PeerConfig(blocks_to_swap=5), JOINED, {}, CPU, ALONE) is given


def test_what_was_counted_is_taken(count, caplog):
    caplog.set_level(logging.INFO)
    count(FITS)
    peer = fitted(PeerConfig(fit="auto"), JOINED, {}, CUDA, ALONE)
    assert peer.offload and peer.train_batch_size == 2
    assert "options that fit, by --fit auto: 9.0 of 11.0 GB are needed with --offload --train_batch_size 2, 14.0 without" in caplog.text
    count(Fit({"blocks_to_swap": 7}, 9e9, 14e9, 11e9))
    peer = fitted(PeerConfig(blocks_to_swap=None, swap_to="disk"), JOINED, {}, CUDA, ALONE)
    assert (peer.blocks_to_swap, peer.swap_to) == (7, "disk") and "--blocks_to_swap auto: 9.0" in caplog.text
    count(Fit({}, 9e9, 9e9, 11e9))
    assert not fitted(PeerConfig(fit="auto"), JOINED, {}, CUDA, ALONE).offload
    assert "--fit auto: 9.0 of 11.0 GB are needed, and no option is changed" in caplog.text
    count(TOO_MUCH)
    with pytest.raises(UserError, match=r"needs 19\.0 GB with --offload, counted, and 11.0 GB are free here.*a GPU of 20 GB"):
        fitted(PeerConfig(fit="auto"), JOINED, {}, CUDA, ALONE)


def test_several_ranks_and_xla_choose_themselves(count):
    for where in ((CPU, Rank(0, 2)), (torch.device("xla"), ALONE)):
        with pytest.raises(UserError, match=r"--fit auto counts the memory of one GPU or CPU.*Choose the options yourself"):
            fitted(PeerConfig(fit="auto"), JOINED, {}, *where)


@pytest.mark.parametrize(
    ("counts", "fix"),
    [
        (FITS, r"Add --offload --train_batch_size 2: counted, 9\.0 GB are then needed of 11\.0, and 14\.0 as it is\."),
        (TOO_MUCH, "Use a GPU of 20 GB or more"),
        (Fit({}, 9e9, 9e9, 11e9), "The cheapest first: lower --train_batch_size"),  # the count was wrong, so it is no help
        (UserError("It is not counted.", fix="Choose."), "The cheapest first: lower --train_batch_size"),
        (MemoryError(), "The cheapest first: lower --train_batch_size"),
    ],
)
def test_where_memory_ran_out_the_error_says_what_would_fit(count, counts, fix):
    count(counts)
    with pytest.raises(UserError, match=f"Out of memory: CUDA out of memory.*{fix}") as short, advised(PeerConfig(), JOINED, {}, CUDA):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert short.value.code == ExitCode.MEMORY


def test_other_errors_are_what_they_were(count):
    count(FITS)
    for error in (ValueError("broken"), UserError("No.", fix="Yes.")):
        with pytest.raises(type(error)) as same, advised(PeerConfig(), JOINED, {}, CUDA):
            raise error
        assert same.value is error


def test_a_gpus_memory_is_a_question_of_check(count):
    count(FITS)
    with pytest.raises(UserError, match=r"A step needs 14\.0 GB of the GPU's memory, counted, and 11\.0 are free\. Add --offload"):
        checked(PeerConfig(), JOINED, {}, CUDA)
    peer, told = checked(PeerConfig(fit="auto"), JOINED, {}, CUDA)
    assert peer.offload and told == ""
    count(Fit({}, 9e9, 9e9, 11e9))
    assert checked(PeerConfig(), JOINED, {}, CUDA)[1] == "9.0 of 11.0 GB are needed"
    count(UserError("It is not counted.", fix="Choose."))
    assert checked(given := PeerConfig(), JOINED, {}, CUDA) == (given, "") == checked(given, JOINED, {}, CPU)


def test_free_is_what_is_there_without_five_percent_and_what_averaging_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10e9, 12e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1e9)
    assert room.free_on_gpu(CUDA) == pytest.approx(10.3e9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10e9, 24e9))
    assert room.free_on_gpu(CUDA) == pytest.approx(9.8e9)
    monkeypatch.setattr("peer.sync.engine.memory.available_bytes", lambda: 2e9)
    alone = room.free_on_host(PeerConfig(), RunConfig(sync="none"), {})
    assert 1.6e9 < alone < 0.8 * 12e9
    params = {"weight": torch.zeros(1_000_000, device="meta")}
    assert room.free_on_host(PeerConfig(), RunConfig(sync="parameters", wire="fp32"), params) < alone - 0.8 * 100e6


def test_auto_is_a_word_of_flags_and_files(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('blocks_to_swap = "auto"\nfit = "auto"\n')
    for argv in (["--blocks_to_swap", "auto", "--fit", "auto"], ["--config", str(file)]):
        peer, _ = parse(["--model", "x", "--train_data_dir", "y", *argv])
        assert peer.blocks_to_swap is None and peer.fit == "auto" and peer.fits_itself
    assert not PeerConfig().fits_itself and PeerConfig(blocks_to_swap=None).unfitted.blocks_to_swap == 0
    for options in ({"device": "cpu"}, {"compile": True}):
        with pytest.raises(UserError, match="blocks_to_swap"):
            PeerConfig(blocks_to_swap=None, **options)
