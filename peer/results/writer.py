"""What a peer trained, written for others to use: at the end, and on the way."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from peer.config import PeerConfig
from peer.contracts import Method
from peer.loop.train import Trainer
from peer.machine.placing import written
from peer.results.result import Form, Result, warn_of_unused, write_result
from swarm.run.method import method_named
from swarm.run_config import RunConfig


class Results:
    """Writes what `trainer` has come to, in the form that this peer wants."""

    def __init__(self, method: Method, trainer: Trainer, run: RunConfig, peer: PeerConfig):
        self._method, self._trainer, self._run, self._peer = method, trainer, run, peer
        self._form = Form(full_pipeline=peer.save_as_full_pipeline, safetensors=peer.safe_serialization)
        if trainer.group.is_main:
            warn_of_unused(self._form, run)

    def weights(self) -> AbstractContextManager:
        """Within it the parameters are those to export and to draw with: their average where one is kept."""
        return self._trainer.average.applied() if self._trainer.average else nullcontext()

    def save(self, step: int) -> None:
        """The result as it is after global step `step`, beside those of other steps; of an embedding never the whole pipeline."""
        if self._trainer.group.is_main:
            name = method_named(self._run.method).steps_name
            self._write(Path(self._peer.output_dir) / f"{name}-steps-{step}", dataclasses.replace(self._form, full_pipeline=False))
        self._trainer.group.barrier()

    def export(self, target: Path) -> None:
        """Write the result; the one before stays until the new one is whole. Rank 0 alone."""
        self._write(target, self._form)

    def _write(self, target: Path, form: Form) -> None:
        trainer, run, peer = self._trainer, self._run, self._peer
        data = peer.dataset_name or Path(peer.train_data_dir).name or run.dataset_digest[:16]
        about = Result.of(run, samples=trainer.sync.samples, round=trainer.sync.round, dataset=data)
        with self.weights(), written(trainer.model, trainer.params) as params:
            write_result(self._method, trainer.model, params, target, about, form)
