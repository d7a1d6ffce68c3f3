"""A loss of one's own, as a user would write it: REINFORCE with an entropy column."""

import torch

from tinsmith.actors.engine.losses.registry import ConfigField, Loss, LossOutput, keep


def reinforce(tokens, config):
    bearing = tokens.bearing(("advantages",))
    gain = keep(bearing, tokens.logprobs) * keep(bearing, tokens.inputs["advantages"])
    surprise = keep(bearing, tokens.logprobs) < config["surprise"]
    return LossOutput(-config["scale"] * gain, bearing, {"surprising_tokens": (surprise & bearing).sum(-1)})


def register(registry):
    registry.register(
        Loss(
            "reinforce",
            reinforce,
            required=("advantages",),
            ignored=("note",),
            config=(ConfigField("scale", default=1.0, low=0.0), ConfigField("surprise", default=-5.0)),
            bearing=("advantages",),
            columns=("surprising_tokens",),
        )
    )


def takes_wrong_shape(tokens, config):
    return LossOutput(torch.zeros(1), tokens.mask)
