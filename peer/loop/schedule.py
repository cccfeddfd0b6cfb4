"""The learning rate as a function of the swarm's committed samples, never of local steps: peers differ in speed."""

from collections.abc import Callable

import torch

from swarm.founding import check_schedule
from swarm.run_config import RunConfig


def build_schedule(run: RunConfig) -> Callable[..., float]:
    """Maps samples in the committed state to the learning rate of the round that is being trained now.

    The schedule is read at the middle of that round: at its start a warm-up would waste the first round with a rate of 0,
    at its end a decay would waste the last one. What falls after the warm-up ends at --lr_min_ratio of the peak, in the same shape.
    A peer whose optimizer began with new moments when the state had `begun` samples rises as the run did, over as many samples:
    AdamW's first steps move every weight by the whole rate, and a late peer's at the peak spoiled what the others had learned
    (the quickstart's third peer: a loss of 0.41 where the others had 0.11).
    Raises UserError for a schedule that needs an end which the run does not have.
    """
    check_schedule(run)
    if run.lr_scheduler == "constant" and not run.lr_warmup_samples:
        return lambda samples, begun=0: run.learning_rate
    from diffusers.optimization import get_scheduler  # a second that a peer without a model (scripts/churn) starts sooner

    # With warm-up, 'constant' means what diffusers calls 'constant_with_warmup': asking for warm-up and getting none is no use.
    name = "constant_with_warmup" if run.lr_scheduler == "constant" else run.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=run.lr_warmup_samples,
        num_training_steps=run.total_samples or None,
        num_cycles=run.lr_num_cycles,
        power=run.lr_power,
    )
    factor = scheduler.lr_lambdas[0]

    def learning_rate(samples: int, begun: int = 0) -> float:
        middle = samples + run.target_batch_size // 2
        if run.total_samples:
            middle = min(middle, (samples + run.total_samples) // 2) if samples < run.total_samples else run.total_samples
        risen = run.lr_min_ratio if middle >= run.lr_warmup_samples else 0.0
        rate = run.learning_rate * (risen + (1 - risen) * factor(middle))
        # diffusers' warm-ups are linear, so that a peer that began at 0 never has less than the run.
        return min(rate, run.learning_rate * ((middle - begun) / run.lr_warmup_samples)) if run.lr_warmup_samples else rate

    return learning_rate
