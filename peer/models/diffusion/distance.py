"""How far an answer is from its target: squared, or by a Huber loss that lets a few large differences count less."""

from collections.abc import Callable

import torch
from torch import Tensor

from swarm.run_config import RunConfig


def distance_of(run: RunConfig, place: Tensor, snr: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    """--loss_type as a function of differences (B, C, h, w), which answers in their shape.

    place: (B,), the timestep as a share of the schedule, 1 is noise alone; snr: (B,) of that timestep, called where the schedule asks.
    Source: kohya-ss/sd-scripts at 48d368fa557731ad0488c07304dfeba8c07910eb, library/train_util.py, `get_huber_threshold_if_needed` and
    `conditional_loss`. Its pseudo-Huber loss is that of Song & Dhariwal 2023, arXiv:2310.14189, scaled to be near the square below c.
    """
    if run.loss_type == "l2":
        return torch.square
    least = run.huber_c
    c = {
        "constant": lambda: torch.full_like(place, least),
        "exponential": lambda: least**place,
        "snr": lambda: (1 - least) / (1 + snr().rsqrt()) ** 2 + least,
    }[run.huber_schedule]().view(-1, 1, 1, 1)
    scale = {"huber": 2 * c, "smooth_l1": 2.0}[run.loss_type]
    # sqrt(d² + c²) - c, written so that float32 does not cancel where d is a thousandth of c.
    return lambda off: scale * off.square() / ((off.square() + c.square()).sqrt() + c)
