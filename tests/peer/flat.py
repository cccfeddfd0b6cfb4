"""Parameters as one vector."""

import torch


def flat(params):
    return torch.cat([parameter.detach().flatten() for parameter in params.values()])
