"""The questions of the preflight, from the far end to this machine and out again. What one has found, later ones use."""

import dataclasses
import logging
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from peer.config import PeerConfig
from peer.launch.joining import Joined, joined
from peer.launch.lengths import of_joiner
from peer.launch.resolving import known_hosts, token_for
from peer.rooms import load_part
from peer.volunteer.check.report import FAIL, NOTE, Answer, Item, NotAsked
from swarm import advice
from swarm.base_model import could_be_on_hub, not_found
from swarm.clock import REFUSED_SECONDS, words
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.run.method import method_named
from swarm.run.optimizer import AUTO, optimizer_named
from swarm.run.strategy import swarms
from swarm.run_config import RunConfig
from swarm.run_identity import with_own_places

log = logging.getLogger(__name__)
STEP_SECONDS = 180.0
_DOWNLOAD_BYTES, _DOWNLOAD_SECONDS = 16 << 20, 5.0


@dataclass
class Machine:
    """This machine and a run, as far as the questions have come. scratch: a folder that is gone afterwards."""

    peer: PeerConfig
    given: Mapping[str, Any]
    scratch: Path
    patience: float = 10.0
    """Seconds to wait for a server that does not answer."""
    join_seconds: float = 30.0
    step_seconds: float = STEP_SECONDS
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    answered: bool = False
    refusal: UserError | None = None
    """Why the server does not let us in."""
    answer: Any = None
    joined: Joined | None = None
    model: Path | None = None
    learner: Any = None
    step_left_behind: bool = False
    wire_bytes: float = 0.0
    visit: Any = None
    rates: dict[str, float] = field(default_factory=dict)
    """Measured bits per second, 'up' and 'down'."""

    def __post_init__(self) -> None:
        self.peer = dataclasses.replace(self.peer, dry_run=True)  # nothing is kept

    def items(self) -> list[Item]:
        names = ("server", "token", "run", "model", "disk", "memory", "speed", "link", "DHT", "clock")
        return [Item(name, getattr(self, f"_{name.lower()}")) for name in names]

    @property
    def url(self) -> str:
        return self.peer.datasetserver or (self.joined.server_url if self.joined else "")

    @cached_property
    def _token_of(self) -> str:
        return token_for(self.url, self.peer)

    @cached_property
    def _device(self) -> Any:
        from peer.launch.launcher import Rank
        from peer.machine.device import choose_device

        return choose_device(self.peer.device, Rank())

    def run(self) -> RunConfig:
        if self.joined is None:
            raise NotAsked("the run is not known")
        return self.joined.run

    # -- the host

    def _server(self) -> Answer | str:
        """Also finds the run: the next two say what of it."""
        if not self.peer.datasetserver:
            raise NotAsked("the run is to be found by way of its peers")
        from peer.data.client.runs import fetch_run

        try:
            self.answer = fetch_run(self.url, self.patience, run_id=self.peer.run_id, token=self._token_of)
        except UserError as error:
            if error.code != ExitCode.AUTH:
                raise
            self.refusal = error
        self.answered = True
        return f"{self.url} answers"

    def _token(self) -> Answer | str:
        if not self.peer.datasetserver:
            raise NotAsked("there is no server to show one to")
        if not self.answered:
            raise NotAsked("the server does not answer")
        if self.refusal:
            raise self.refusal
        if self.answer is None:
            return "the server lets this machine in"
        try:
            known_hosts(self.peer).check(self.url, self.answer.run_id, self.answer.host_key)
        except UserError as error:
            return Answer(error.message, error.fix, FAIL, error.code)
        key = "it is the host that was named" if self.peer.host_key else f"the host's key is {self.answer.host_key[:16]}..."
        return f"the server lets this machine in; {key}"

    def _run(self) -> Answer | str:
        if self.peer.datasetserver:
            if self.refusal or not self.answered:
                raise NotAsked("the server did not let us ask")
            return self._run_of_server()
        from swarm.discovery import find_run

        found = find_run(self.peer.peers, run_id=self.peer.run_id)
        if found is None:
            raise UserError(
                "The peers given answer, but none of them is in a run.", fix="Ask the host for its server's URL.", code=ExitCode.NETWORK
            )
        run = found.run
        run.refuse_differences(of_joiner(self.given, self.peer, run))
        self.joined = Joined(run, found.server_url, self.peer.peers, found.head, extension=found.extension)
        end = End(run, known_hosts(self.peer).key_of(run.run_id), found.extension)
        return self._about(run, (found.head or {}).get("samples", 0), end.total)

    def _run_of_server(self) -> Answer | str:
        if self.answer is None:
            raise UserError(f"{self.url} has no run yet.", fix="Ask the host to start it, then check again.", code=ExitCode.NETWORK)
        self.joined = joined(self.peer, self.given, self.answer)
        run, head, extension = self.joined.run, self.answer.head, self.answer.extension
        return self._about(run, head.samples if head else 0, extension.total_samples if extension else run.total_samples)

    def _about(self, run: RunConfig, samples: int, total: int) -> Answer | str:
        if 0 < total <= samples:
            return Answer(
                f"'{run.run_name}' is over: all its {total:,} samples are trained", "Ask the host for the next one.", FAIL, ExitCode.CONFIG
            )
        end = f"{samples:,} of {total:,} samples" if total else f"{samples:,} samples, without an end"
        return f"'{run.run_name}': {run.method} of {run.model} at {run.resolution} px, --sync {run.sync}, {end}"

    # -- this machine

    def _model(self) -> Answer | str:
        run = self.run()
        from peer.launch.starting_model import locate_for
        from swarm.digest import digest_model

        method_named(run.method).check_files(with_own_places(run, self.given))
        name = self.given.get("model") or run.model
        if could_be_on_hub(name) and not Path(name).exists() and not _in_hub_cache(name):
            return Answer(
                f"{name} is not on this machine yet", "It is fetched from the Hub at the first start: some GB; then check again.", NOTE
            )
        source = locate_for(run, self.given)
        self.say("reading the model's weights for their digest ...")
        found = digest_model(source)
        if run.model_digest and found != run.model_digest:
            raise UserError(
                f"{source} has weights with the digest {found[:16]}, but the run began with {run.model_digest[:16]}.",
                fix=f"Fetch {run.model} as the founder has it, or give its folder with --model.",
            )
        self.model = source
        return f"{source}: the weights are the run's (digest {found[:16]})"

    def _disk(self) -> Answer | str:
        """Before the model is loaded, so by the size of its files: states, checkpoints and the result are at most as large as it is in fp32."""
        from peer.machine.disk_space import check_space, needed_by

        peer, folder = self.peer, _existing(Path(self.peer.output_dir))
        if not _writable(folder):
            raise UserError(f"{folder} cannot be written in.", fix="Choose another --output_dir.", code=ExitCode.DISK)
        weights = _fp32_bytes(self.model) if self.model else 0
        trained = weights if self.joined is None or method_named(self.joined.run.method).whole else min(weights, 100_000_000)
        needed = needed_by(peer, Path(peer.output_dir), trained, self.joined.run.optimizer if self.joined else AUTO)
        kinds = (not peer.own_data) + peer.cache_latents + peer.cache_text
        caches, apart = kinds * peer.cache_gib * 2**30, _existing(peer.cache_folder)
        if apart.stat().st_dev == folder.stat().st_dev:
            needed, apart = needed | {"caches": caches}, None
        fits, told = check_space(folder, needed)
        if apart and (free := shutil.disk_usage(apart).free) < caches:
            fits, told = False, f"{told}; {apart} has {advice.size(free)} free, and the caches take up to {advice.size(caches)}"
        if not fits:
            return Answer(told, "Free some space, lower --cache_gib or --checkpoints_total_limit, or choose another --output_dir.", NOTE)
        return told if self.model else Answer(told, "Not counted: what depends on the model.", NOTE)

    def _memory(self) -> Answer | str:
        """Loads the model, as training would, after a look whether it can fit at all."""
        run = self.run()
        if self.model is None:
            raise NotAsked("the model is not here")
        from peer.sync.engine.codec import Wire
        from peer.sync.engine.memory import SIDECAR_BYTES, available_bytes, check_memory, host_bytes
        from peer.sync.engine.vectors import Schema

        if self.model.is_file():  # all of it passes through the memory in float32, also to be counted
            _check_alone(_fp32_bytes(self.model), available_bytes())
        fitting = self._fit()
        if self.model.is_dir():
            _check_alone(self._held_bytes(), available_bytes())
        self.say("loading the model ...")
        learner = self._trial_learner()
        if not swarms(run.sync):
            self.learner = learner
            return f"the model is loaded; this run averages nothing{fitting}"
        wire = Wire.of(run.wire, Schema.of(learner.params))
        self.wire_bytes = wire.num_bytes
        on_host = any(parameter.is_cpu for parameter in learner.params.values())
        needs = host_bytes(load_part("sync", run.sync).strategy(run), wire, params_on_host=on_host, state_on=self.peer.state_on)
        trained = sum(parameter.numel() for parameter in learner.params.values())
        # Gradients and the optimizer's state of what is trained on a CPU come with the first step.
        needs |= {"gradients and optimizer": (4 + max(optimizer_named(run.optimizer).state_bytes)) * trained} if on_host else {}
        free = available_bytes()
        check_memory(needs, free)
        self.learner = learner
        return f"{advice.size(sum(needs.values()) + SIDECAR_BYTES)} needed besides the loaded model, {advice.size(free)} free; {trained:,} parameters are trained{fitting}"

    def _fit(self) -> str:
        """What the run needs of the GPU's memory, counted before the model is loaded; the options of --fit auto are taken."""
        from peer.launch.fitted import checked

        if self._device.type == "cuda" or self.peer.fits_itself:
            self.say("counting what the run needs of the memory ...")
        self.peer, told = checked(self.peer, self.joined, {**self.given, "model": str(self.model)}, self._device)
        return f"; on the GPU {told}" if told else ""

    def _held_bytes(self) -> int:
        """What a folder's weights take of the host's memory once they are placed; 0 on a GPU, which takes them one by one: `_fit` counts these."""
        from peer.launch.starting_model import load_unchecked
        from peer.machine.needs import Needs

        if self._device.type == "cuda":
            return 0
        run = with_own_places(self.run(), self.given)
        return Needs(run, lambda: load_unchecked(run, {**self.given, "model": str(self.model)}), self._device).weights(self.peer)

    def _trial_learner(self) -> Any:
        from peer.launch.measured_batch import trial_learner
        from peer.loop.rounding import keep_in_bf16

        peer = dataclasses.replace(self.peer, output_dir=str(self.scratch), cache_dir="")  # gone afterwards: nothing of this is kept
        learner = trial_learner(peer, Joined(self.run()), {**self.given, "model": str(self.model)}, self._device)
        if peer.weights == "bf16":
            keep_in_bf16(learner.params)
        return learner

    def _speed(self) -> Answer | str:
        if self.learner is None:
            raise NotAsked("the model is not loaded")
        from peer.volunteer.check.speed import measure_step

        self.step_left_behind = True
        step = measure_step(self.learner, self.run(), self.peer, self.step_seconds, self.say)
        self.step_left_behind = False
        return (
            f"{step.seconds:.2f} s for a step of {step.samples} picture{'s' * (step.samples != 1)} at {self.run().resolution} px: {step.samples / step.seconds:.2f} samples/s "
            f"on {step.where}"
        )

    # -- the others

    def _link(self) -> Answer | str:
        """Down from the server, and both ways to a peer; what a round will take at that."""
        found = []
        if self.joined and self.url:
            found.append(self._from_server())
        if self.joined and self.joined.initial_peers:
            found.append(self._to_peers())
        if not found:
            raise NotAsked("there is nobody to measure with")
        if not self.rates:
            raise UserError(
                "; ".join(text.rstrip(".") for text in found) + ".", fix="Check the connection, then try again.", code=ExitCode.NETWORK
            )
        if self.wire_bytes:
            most = advice.round_traffic(self.wire_bytes, 1000, 1000)
            seconds = max(most.up / self.rates.get("up", float("inf")), most.down / self.rates["down"]) * 8
            found.append(f"a round moves up to {advice.size(most.up)} each way: {advice.duration(seconds)}")
        return "; ".join(found)

    def _from_server(self) -> str:
        from peer.data.client.probing import download
        from peer.data.client.transport import Refusal, ServerAway

        manifest = getattr(self.answer, "manifest", "")
        if not manifest:
            return "the server was not asked"
        try:
            count, seconds = download(self.url, manifest, self._token_of, most_bytes=_DOWNLOAD_BYTES, seconds=_DOWNLOAD_SECONDS)
        except (ServerAway, Refusal) as fault:
            return f"the server gave nothing: {fault}"
        if not count:
            return "the server gave nothing"
        self.rates["down"] = 8 * count / max(seconds, 1e-6)
        return f"from the server {self.rates['down'] / 1e6:,.0f} Mbit/s ({advice.size(count)} in {seconds:.1f} s)"

    def _to_peers(self) -> str:
        visit = self._visited()
        if visit.speed is None:
            return f"to no peer: {visit.why or 'none is there that could be asked'}"
        self.rates["up"] = visit.speed.up
        self.rates["down"] = max(self.rates.get("down", 0.0), visit.speed.down)
        return f"to a peer {visit.speed.up / 1e6:,.0f} Mbit/s, and from it {visit.speed.down / 1e6:,.0f}"

    def _dht(self) -> Answer | str:
        if self.joined is None or not self.joined.initial_peers:
            raise NotAsked("no address that leads into it is known")
        visit = self._visited()
        if visit.error:
            raise visit.error
        found = f"joined; {visit.peers} peers of the run are live"
        if visit.reachability:
            found += f"; {visit.reachability}"
        return Answer(found, "", NOTE) if visit.client_mode else found

    def _visited(self) -> Any:
        if self.visit is None:
            from peer.volunteer.check.visit import visit

            assert self.joined is not None
            self.visit = visit(self.joined, self.peer, self.scratch, self.join_seconds)
        return self.visit

    def _clock(self) -> Answer | str:
        if not (self.joined and self.url):
            raise NotAsked("only a server tells its time")
        from peer.data.client.probing import distance
        from peer.data.client.transport import ServerAway

        try:
            found = distance(self.url, self._token_of)
        except ServerAway as away:
            raise UserError(f"The server does not answer any more: {away}.", fix="Check again.", code=ExitCode.NETWORK) from None
        told = f"{words(found.ahead)} the server's (a question takes {1000 * found.seconds:.0f} ms)"
        if abs(found.ahead) > REFUSED_SECONDS + found.seconds:
            return Answer(
                f"this machine's clock is {told}: others would take its records for old or invented",
                "Set it by NTP: sudo timedatectl set-ntp true",
                FAIL,
                ExitCode.CLOCK,
            )
        return told


def _check_alone(weights: int, free: float) -> None:
    """Raises UserError when the model's weights do not fit into the memory."""
    if weights > free:
        raise UserError(
            f"The model alone takes {advice.size(weights)} of memory, and {advice.size(free)} are free.",
            fix="End other programs here, or use a machine with more memory.",
            code=ExitCode.MEMORY,
        )


def _fp32_bytes(model: Path) -> int:
    """Of the weights in float32."""
    from swarm.digest import read_header, weight_files

    headers = [read_header(path) for path in weight_files(model)]
    return 4 * sum(math.prod(entry["shape"]) for header in headers for entry in header.values() if "shape" in entry)


def _in_hub_cache(name: str) -> bool:
    """Raises UserError for a name that no model of the Hub can have."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "model_index.json"), str)
    except HFValidationError:
        raise not_found(name) from None


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _writable(folder: Path) -> bool:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
