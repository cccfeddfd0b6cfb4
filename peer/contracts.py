"""All there is to learn before adding a part: what the rooms of the peer hand to each other.

`params: dict[str, nn.Parameter]`, the named tensors being trained, is the only thing that methods, optimizers, sync,
checkpoints and exporters share; none of them knows the family or the method.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peer.config import PeerConfig
from swarm.bans import Bans
from swarm.end import End
from swarm.members import Members
from swarm.run.family import Family
from swarm.run.method import method_named
from swarm.run_config import RunConfig
from swarm.signing import KnownHosts
from swarm.wrong_states import Accusation

Params = dict[str, nn.Parameter]
"""By the part's name, a dot, and the name within it."""


def parts_of(params: Params) -> set[str]:
    """The names of the model's parts in which something is trained: a parameter's name begins with its part's."""
    return {name.split(".")[0] for name in params}


Text = dict[str, Tensor]
"""What a denoiser is told of B captions: float32 tensors whose first dimension is B, under names that the family chooses.

The second dimension may be as long as the longest caption needs: what of a text is shorter is padded with zeros, and a mask of the family says where.
"""


@dataclass(frozen=True)
class Sample:
    """One captioned picture as its source holds it: encoded image bytes, and a key that no other sample of the run has."""

    key: str
    image: bytes
    caption: str | Sequence[str]
    """Or several captions, one of which is taken by chance."""
    number: int = 0
    """The how-many-th it was drawn, which the pool says (peer/samples/buckets.py)."""
    mask: bytes = b""
    """An encoded picture of where the loss counts; empty where `image` itself says so, or nothing does."""
    weight: float = 1.0
    """What its loss is multiplied with."""

    @classmethod
    def of(cls, key: str, image: bytes, captions: Sequence[str], mask: bytes = b"", weight: float = 1.0) -> "Sample":
        """captions: at least one."""
        return cls(key, image, captions[0] if len(captions) == 1 else captions, mask=mask, weight=weight)

    @classmethod
    def bad(cls, key: str) -> "Sample":
        """In place of what cannot be read: it is left out and counted, like a picture that cannot be decoded."""
        return cls(key, b"", "")


@dataclass(frozen=True)
class PixelBatch:
    """Of B pictures; none where all were left out. captions: B strings, '' where the caption was dropped."""

    pixels: Tensor | None
    """(B, 3, H, W) float32 in [-1, 1]: one for each picture that is not in `latents`, in their order."""
    captions: Sequence[str]
    geometry: Tensor | None = None
    """(B, 6) int64, what SDXL is told of each picture: its height and width, where the crop began (top, left), and the crop's height and width."""
    weights: Tensor | None = None
    """(B,) float32, what each picture's loss is multiplied with; None: 1."""
    latents: Mapping[int, Tensor] = field(default_factory=dict)
    """What is known of some pictures, by their place in the batch: (2C, h, w), as `Model.encode_pixels` has it."""
    text: Text | None = None
    """What the text encoders said of the captions, where that is known, on the host."""
    names: Sequence[str] = ()
    """Under which a cache is to keep the latents of the B pictures; empty without one."""
    masks: Sequence[Tensor] = ()
    """B masks, (1, H, W) or of the latents' size, float32 in [0, 1]: how much each place counts in the loss; empty: all places count as 1."""
    keys: Sequence[str] = ()
    """Of the samples among the B pictures, in their order; pictures of the class come after them and have none here."""
    bad: Sequence[str] = ()
    """Keys of the samples that are left out, being no pictures."""
    skipped: Sequence[tuple[str, Exception]] = ()
    """All that is left out, also of the class, by key or name, each with the reason."""


@dataclass(frozen=True)
class LatentBatch:
    """latents: (B, C, h, w) float32, one draw for each picture in the denoiser's scale; text, geometry and mask, (B, 1, h, w): of the same B."""

    latents: Tensor
    text: Text
    geometry: Tensor | None = None
    mask: Tensor | None = None


Hold = Callable[[Tensor], Tensor]
"""Keeps a tensor on the host, from any device: in RAM (`Tensor.cpu`) or in a file. Returns it as it is there."""


class Model(Protocol):
    """A family's module offers `load(source: Path, device: torch.device | None, run: RunConfig) -> Model`; raises UserError for an option it cannot have."""

    facts: Family
    """What is to know of the family without its tensors: swarm/run/families/NAME.py."""
    pipeline: Any
    """The diffusers pipeline that the parts belong to; exporters and validation use it."""
    parts: dict[str, nn.Module]
    """Those of `facts.parts` that this model has."""
    resolution_multiple: int
    trained_by: str
    """What the log says of the loss beside the run's own options; '' where these say all."""
    made_for: int
    """Pixels on a side of the pictures that the model was made for; 0: it does not say."""
    drawn_with: Mapping[str, Any]
    """Arguments of the pipeline's call that this very model wants, where nobody gives others."""

    def place(self, device: torch.device, dtype: torch.dtype | None = None, whole: Collection[str] = (), *, hold: Hold | None = None) -> None:
        """Move to `device`, in float32; what of parts not trained as a `whole` autocast computes with, in its `dtype`. Before a method attaches.

        hold: the parts are to compute on `device`, and wait on the host until they are called for (peer/machine/turns.py, swap.py): where they are,
        and where `hold` keeps what is cast.
        """
        ...

    def blocks(self) -> Sequence[nn.Module]:
        """The denoiser's blocks in the order in which it calls them, each once; none where it is no chain of blocks."""
        ...

    def pack(self, precision: str, device: torch.device, *, hold: Hold | None = None) -> None:
        """Hold the weights of the denoiser's blocks in fewer bits, on `device`: --base_precision. Before `place`, of a denoiser that is not trained.

        hold: they are made on `device`, one layer at a time, and wait where `hold` keeps them.
        """
        ...

    def unpacked(self) -> AbstractContextManager[None]:
        """Within it, what `pack` holds in fewer bits is computed with as it was before. Raises UserError where it cannot be read again."""
        ...

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """(B, 2C, h, w) float32: mean and standard deviation of the latents of (B, 3, H, W) pixels, in the denoiser's scale.

        Without gradient and without chance, so cacheable.
        """
        ...

    def decoding_exactly(self) -> AbstractContextManager[None]:
        """Within it the VAE decodes in float32 what it would overflow in: fp16, where autocast computes in that."""
        ...

    def encode_text(self, captions: Sequence[str]) -> Text:
        """What the denoiser is told of the captions: with a gradient where something in a text encoder is trained, cacheable where not."""
        ...

    def prompt_arguments(self, prompts: Sequence[str]) -> dict[str, Any]:
        """What the pipeline is called with, in place of the prompts, so that it reads them as captions are read in training."""
        ...

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: one loss per sample."""
        ...

    def unread(self) -> Sequence[nn.Module]:
        """Modules within the parts that no loss depends on: they have no gradient, and an optimizer's weight decay must not touch them."""
        ...

    def save(self, folder: Path) -> None:
        """Write a diffusers folder that plain `from_pretrained` loads."""
        ...


class Method(Protocol):
    """A method's module offers `build(run: RunConfig) -> Method`."""

    def whole(self, model: Model) -> Collection[str]:
        """The names of the parts all of whose weights are trained: they are never held in less than float32 before `attach`."""
        ...

    def begin(self, model: Model) -> None:
        """Read what training begins with: of the weights as they were published, before `model.place`, and of the run's files. Raises UserError.

        Whoever fills in a state later, to export or draw it, leaves this out.
        """
        ...

    def attach(self, model: Model) -> Params:
        """Choose the tensors to train (float32, requires_grad), freeze all else, put the model in its training mode."""
        ...

    def export(self, model: Model, params: Params, folder: Path) -> None:
        """Write the result of training into `folder`."""
        ...


@dataclass(frozen=True)
class Member:
    """One peer's part in a round: its contribution's number and how many samples are in it."""

    peer: str
    number: int
    samples: int


@dataclass(frozen=True)
class CommittedRound:
    """A state that is safe: a second peer signed its digest, or it is on disk. Any member may report it to the server."""

    digest: str
    parent: str
    round: int
    samples: int
    """All samples ever averaged into the state, these members' included."""
    members: tuple[Member, ...]


@dataclass(frozen=True)
class SyncReport:
    """What happened in the swarm since the last report; the loop maps contribution numbers to sample keys."""

    frozen: int | None = None
    """Number of the contribution that holds all samples counted since the one before; register its keys, then call `step` again."""
    final: tuple[int, ...] = ()
    """Our contributions that are now in a final state, or of which others tell the ledger: with their samples we are done."""
    dropped: tuple[int, ...] = ()
    """Our contributions that will never be in the state: give their samples back. 0 stands for the samples not yet frozen."""
    final_rounds: tuple[CommittedRound, ...] = ()
    proven: tuple[Accusation, ...] = ()
    """What is proven of peers that signed a false mean, for whoever keeps the ledger."""
    wait: bool = False
    """Do not train now: call `step(0)` again (it blocks for a while itself), until this is False."""
    done: bool = False
    """The run's total_samples are in the state, and that state is final."""


@dataclass(frozen=True, kw_only=True)
class SyncContext:
    """What a strategy is built from; only rank 0 of a launch builds one."""

    run: RunConfig
    peer: PeerConfig
    params: Params
    output_dir: Path
    server_url: str = ""
    initial_peers: tuple[str, ...] = ()
    known: bool = False
    """Whether this peer was in the run before, and goes on although nobody may answer."""
    end: End | None = None
    """Where the run ends, which its host may put off; None: at its total_samples."""
    members: Members | None = None
    """Who takes part; None: whoever comes."""
    last_known: Mapping[str, Any] | None = None
    """{digest, round, samples, peers} of the newest state that the server or the DHT knows of; nobody starts behind it."""


class Sync(Protocol):
    """A strategy's module offers `build(context: SyncContext) -> Sync`. Never raises because a neighbour was lost."""

    round: int
    samples: int
    """Samples in the committed state; learning-rate schedules follow it."""
    peers: int

    def catch_up(self) -> SyncReport:
        """Begin to take over the swarm's state if ours is behind; `wait` in the report says to go on with `step(0)`."""
        ...

    def before_step(self) -> bool:
        """Whether the local optimizer steps now.

        If not, the strategy has taken over this step's gradients: each parameter's `.grad`, finite and not scaled, held the SUM of the
        losses' gradients over the step's samples of all ranks.
        """
        ...

    def step(self, samples: int, loss: float | None = None) -> SyncReport: ...

    def registered(self, number: int, receipt: str) -> None:
        """The host's receipt for contribution `number`, which was just frozen (`swarm.receipts`): it goes where that goes."""
        ...

    def withdraw(self, number: int) -> SyncReport:
        """The source refused contribution `number`, which was just frozen (LeaseLost): never offer it, take its work out of the parameters."""
        ...

    def undo(self) -> SyncReport:
        """The optimizer's step broke off half-way: take out of the parameters what no contribution holds, where others know what was before."""
        ...

    def rest(self, resting: bool) -> None:
        """This machine's owner wants it back for a while: average what we have; `step(0)` meanwhile. Until told otherwise."""
        ...

    def measured(self, loss: float) -> None:
        """The loss of held-out pictures in the state of `round`, for others to see."""
        ...

    def leave(self, *, hurry: bool) -> SyncReport:
        """Offer the work done, wait a few seconds for it to be averaged, and say what became of it.

        While the report says `wait`, its samples are registered or final and `leave` is called again. hurry: somebody waits for us to
        end, so within 20 s it must not say that; else the data have ended, and the run's last state may be on its way here.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> SyncReport:
        """A process that has ended had `state`, and the parameters, which are loaded already: what became of its work."""
        ...

    def close(self, reason: str = "") -> None:
        """reason: why the training failed, for other peers to read."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """What a source is built from; a field that a source has no use for is ignored."""

    run: RunConfig
    url: str = ""
    """The dataset server's, '' without one."""
    token: str = field(default="", repr=False)
    """What it asks of us, '' without one."""
    peer: PeerConfig = field(default_factory=PeerConfig)
    """What this machine chose: its pictures, its key's file, its cache."""
    end: End | None = None
    """To be told when the host puts off the run's end; None: nobody asks."""
    bans: Bans | None = None
    """To be told whom the host keeps out; None: nobody asks."""
    known_hosts: KnownHosts | None = None
    """Which host's word to take; None: any that is signed."""
    peer_id: str
    batch_samples: int = 1
    """Samples of one local step of all ranks: how many are asked for at a time."""
    window_samples: int = 0
    """How many samples all ranks take at a time, where the frozen parts encode ahead of the steps; 0: those of a step."""
    epochs: int | None = None
    """Passes over the data; None: until the run ends."""

    @property
    def bare_caption(self) -> str | None:
        """The caption of pictures that have none; None: they cannot be trained on."""
        return self.peer.instance_prompt or ("" if method_named(self.run.method).bare_pictures else None)


class LeaseLost(Exception):
    """Other peers may train these samples: the contribution that holds them must not be offered, and its work is to be dropped."""


class Source(Protocol):
    """Where samples come from. A module of peer/data offers `build(context: SourceContext) -> Source`."""

    def __iter__(self) -> Iterator[Sample]:
        """Samples until the data or the run ends; blocks while the source has none, and wakes up when closed.

        Asked anew behind its end, it yields what was given back since.
        """
        ...

    def held_out(self) -> Sequence[Sample] | None:
        """What --validation_split holds out, the same each time and never yielded; None: not here yet, ask again."""
        ...

    def register(self, number: int, keys: Sequence[str]) -> str:
        """Contribution `number`, about to be offered, holds exactly these samples: its receipt, '' without one. Raises LeaseLost."""
        ...

    def report_final(self, committed_round: CommittedRound) -> None:
        """Tell whoever keeps the ledger that this state is final."""
        ...

    def report_proofs(self, accusations: Sequence[Accusation]) -> None:
        """Tell whoever keeps the ledger who is proven to have lied."""
        ...

    def acknowledge(self, keys: Sequence[str]) -> None:
        """Their work is in a final state: never yield them again."""
        ...

    def rest(self, resting: bool) -> None:
        """This machine's owner wants it back for a while: yield nothing and keep nothing from others that was not yielded yet; until told otherwise."""
        ...

    def give_back(self, keys: Sequence[str]) -> None:
        """Their work is lost: they may be trained again, by anyone."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
