"""What an assisting peer tells the process that measures for it: lines of JSON, with the excerpts' bytes behind them; and what that answers."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

_PIECE_BYTES = 1 << 20


class Losses(NamedTuple):
    """Mean losses before and after one contribution: of pictures of the run, and of pictures that its peer had leased for it."""

    before: float
    after: float
    own_before: float | None = None
    own_after: float | None = None
    """None where the server does not say which these are."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Measure what some members brought to a round. state: a file of what they brought it to; start: of the excerpts, in the vector's elements."""

    round: int
    state: Path
    start: int
    end: int
    excerpts: Mapping[str, Tensor]
    """Member -> its encoded parts of the elements [start, end), uint8."""
    numbers: Mapping[str, int]
    """Member -> the number of its contribution."""

    def pieces(self) -> Iterator[bytes | memoryview]:
        """All of it, a MiB at a time: so that nothing is copied as a whole."""
        lengths = {peer: encoded.numel() for peer, encoded in self.excerpts.items()}
        head = {"round": self.round, "state": str(self.state), "start": self.start, "end": self.end, "excerpts": lengths, "numbers": self.numbers}
        yield json.dumps(head).encode() + b"\n"
        for encoded in self.excerpts.values():
            for piece in encoded.split(_PIECE_BYTES):
                yield memoryview(piece.numpy())

    @classmethod
    def read(cls, stream: BinaryIO) -> "Order | None":
        """The next; None at the stream's end."""
        line = stream.readline()
        if not line:
            return None
        head = json.loads(line)
        excerpts = {peer: _read(stream, length) for peer, length in head["excerpts"].items()}
        return cls(**{**head, "state": Path(head["state"]), "excerpts": excerpts})


def _read(stream: BinaryIO, length: int) -> Tensor:
    room = torch.empty(length, dtype=torch.uint8)
    view, at = memoryview(room.numpy()), 0
    while at < length:
        count = stream.readinto(view[at:])
        if not count:
            raise EOFError("the peer has ended")
        at += count
    return room


def answer(losses: Mapping[str, Losses]) -> bytes:
    """As a line, by member."""
    return json.dumps(losses).encode() + b"\n"


def read_answer(line: bytes) -> dict[str, Losses]:
    return {peer: Losses(*losses) for peer, losses in json.loads(line).items()}
