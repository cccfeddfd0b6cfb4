"""Pictures of the same prompts from the same seeds every N steps, so that people can see what the model has learned."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peer.contracts import Model
from peer.machine.device import Precision, RankGroup
from peer.models.diffusion.noising import ddim
from swarm.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Draws a grid, a row for each prompt. It changes nothing of the training: neither parameters nor modes nor any random number.

    Rank 0 alone draws, and in a swarm right after a round: nobody waits for this peer until the others have trained the whole next round.
    """

    model: Model
    group: RankGroup
    precision: Precision
    prompts: Sequence[str]
    images: int
    """Pictures of each prompt."""
    denoising_steps: int
    side: int
    """Of a picture, in pixels."""
    seed: int
    folder: Path
    weights: Callable[[], AbstractContextManager]
    """Within it the model has the weights to draw with."""
    show: Callable[[int, Any], None]
    """Is handed the global step and the grid, a PIL picture."""
    share: Callable[[list[tuple[str, Any]]], None] = lambda drawn: None
    """Is handed each prompt with its pictures in one."""

    def draw(self, step: int) -> None:
        """All ranks call it, and wait for one prompt at a time: for more, the group would take a rank for lost."""
        rows: list[list[Any]] = []
        with ExitStack() as drawing:
            if self.group.is_main:
                drawing.enter_context(self.weights())
                drawing.enter_context(untouched(self.model, self.precision.device))
            for prompt in self.prompts:
                if self.group.is_main:
                    rows.append(self._pictures(prompt))
                self.group.barrier()
        if self.group.is_main:
            self._publish(step, rows)

    def _pictures(self, prompt: str) -> list[Any]:
        with torch.no_grad(), self.precision.autocast():
            return self.model.pipeline(
                **self.model.prompt_arguments([prompt] * self.images),
                **self.model.drawn_with,
                num_inference_steps=self.denoising_steps,
                height=self.side,
                width=self.side,
                generator=[torch.Generator().manual_seed((self.seed + number) % 2**64) for number in range(self.images)],
            ).images

    def _publish(self, step: int, rows: list[list[Any]]) -> None:
        from diffusers.utils import make_image_grid

        grid = make_image_grid([picture for row in rows for picture in row], rows=len(self.prompts), cols=self.images)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:06}.png"
        grid.save(path)
        log.info("drew %s", path)
        self.show(step, grid)
        columns = next(count for count in range(1, self.images + 1) if self.images % count == 0 and count * count >= self.images)
        squares = [make_image_grid(row, rows=self.images // columns, cols=columns) for row in rows]
        self.share(list(zip(self.prompts, squares, strict=True)))


def check_steps(scheduler: Any, option: str, steps: int) -> None:
    """Raises UserError for more than pictures can be drawn in: DDIM takes each step of the noise once at most, others divide them."""
    if _is_drawn_by_ddim(scheduler) and steps > (most := scheduler.config.num_train_timesteps):
        raise UserError(f"{option} is {steps}, but the noise of this model has {most} steps.", fix=f"Use at most {most}; 25 is usual.")


def _is_drawn_by_ddim(scheduler: Any) -> bool:
    """Whether that fits the model; else its own kind draws."""
    from diffusers import DDIMScheduler

    return DDIMScheduler in getattr(scheduler, "compatibles", ())


@contextmanager
def untouched(model: Model, device: torch.device) -> Iterator[None]:
    """Within the block the model is in its mode for drawing, with a scheduler of its own, and decodes one picture at a time; afterwards all is as before."""
    pipeline = model.pipeline
    scheduler = pipeline.scheduler
    pipeline.scheduler = ddim(scheduler.config) if _is_drawn_by_ddim(scheduler) else type(scheduler).from_config(scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    try:
        with evaluated(model, device), one_by_one(model.parts["vae"]), model.decoding_exactly():
            yield
    finally:
        pipeline.scheduler = scheduler


@contextmanager
def one_by_one(vae: Any) -> Iterator[None]:
    """Within the block the VAE decodes one picture at a time, if its class can. SDXL's takes several GB for each of 1,024 px: a batch of four fits no small GPU."""
    before = getattr(vae, "use_slicing", None)
    if before is False:
        vae.enable_slicing()
    try:
        yield
    finally:
        if before is False:
            vae.disable_slicing()


@contextmanager
def evaluated(model: Model, device: torch.device) -> Iterator[None]:
    """Within the block no layer is in its training mode; afterwards each is in its own, and random numbers go on where they were."""
    modes = {module: module.training for part in model.parts.values() for module in part.modules()}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for part in model.parts.values():
                part.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
