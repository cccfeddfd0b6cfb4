"""Flow matching: the way from the picture to the noise is predicted at a point of it (Esser et al. 2024, arXiv:2403.03206)."""


from swarm.options import option, options
from swarm.run.loss import Loss


@options
class Options:
    """Of flow matching."""

    weighting_scheme: str = option(
        "none",
        "How points between picture and noise are drawn (logit_normal, mode) or weighted (sigma_sqrt, cosmap).",
        choices=("none", "logit_normal", "mode", "sigma_sqrt", "cosmap"),
        section="the loss: flow matching",
    )
    logit_mean: float = option(0.0, "Mean of --weighting_scheme logit_normal.", ge=None)
    logit_std: float = option(1.0, "Its standard deviation.")
    mode_scale: float = option(1.29, "Scale of --weighting_scheme mode.")
    timestep_shift: float = option(
        0.0,
        "Shift the points that are drawn, above 1 towards the noise, as a scheduler with this shift would; 0: as the model's own scheduler.",
        le=100,
        since="0.1.1",
        unsaid=0.0,
    )


LOSS = Loss(title="flow matching", options=Options)
