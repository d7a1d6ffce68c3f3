"""A registered loss is held to the promises of the built-in ones."""

from __future__ import annotations

import numpy as np
from invariance.groups import ALIAS
from invariance.script import Bases
from losses.my_losses import register

from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.engine.losses.registry import LossRegistry
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs
from tinsmith.bus.protocol.datum import Datum


def test_an_input_that_a_loss_ignores_may_be_of_any_shape_or_absent(base_of: Bases) -> None:
    losses = LossRegistry.builtin()
    register(losses)
    engine = Engine(base_of("llama"), alias=ALIAS, losses=losses)
    engine.create("m", CreateModelArgs(base=ALIAS))
    plain = {"target_tokens": [2, 3], "advantages": [1.0, 0.5]}
    args = ForwardArgs(loss="reinforce")

    def columns(*notes: list[float] | None) -> dict[str, np.ndarray]:
        data = [Datum([1, 2], plain if note is None else {**plain, "note": note}) for note in notes]
        return engine.forward("m", data, engine.plan(data), args, backward=False).columns

    expected = columns(None, None)
    for notes in (([7.0], None), (None, [1.0, 2.0, 3.0]), ([7.0, 8.0], [9.0])):
        for name, column in columns(*notes).items():
            np.testing.assert_array_equal(column, expected[name])
