"""The same commands give the same bits, whatever other tenants did in between."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance.cases import NEIGHBOURS, STEP, Case, cases, neighbour
from invariance.groups import Answer, Call, RankGroup, forward, forward_backward, step
from invariance.script import Bases, Groups, start
from reference.cases import CONFIGS

from tinsmith.bus.protocol.datum import Datum

MAX_EXAMPLES = max(4, settings().max_examples // 3)


def own_answers(group: RankGroup, base, case: Case, first: list[Call], batches, between: list[str]) -> list[Answer]:
    """What the model's own commands gave, with others' in between."""
    script: list[tuple[Call, bool]] = [(call, True) for call in first]
    others = 0
    config = CONFIGS[case.loss]

    def disturb(data: list[Datum]) -> None:
        nonlocal others
        for what in between:
            others += 1
            script.extend((call, False) for call in neighbour(what, data, case, others))

    for data in batches:
        for call in (forward_backward(data, case.loss, config), forward_backward(data[:1], case.loss, config)):
            script.append((call, True))
            disturb(data)
        script += [(Call("gradients"), True), (step(**STEP), True)]
        disturb(data)
        script += [(forward(data, case.loss, config), True), (Call("weights"), True), (Call("optimizer"), True)]
    answers = group.run(base, [call for call, _ in script])
    return [answer for answer, (_, own) in zip(answers, script, strict=True) if own]


@settings(max_examples=MAX_EXAMPLES)
@given(case=cases(), between=st.lists(st.sampled_from(NEIGHBOURS), min_size=1, max_size=3))
def test_two_runs_are_equal_to_the_bit_whatever_others_did(
    group_of: Groups, base_of: Bases, case: Case, between: list[str]
) -> None:
    base, group = base_of("llama"), group_of(2)
    first, judge = start(group, base, case)
    batches = [case.batch(judge, number) for number in range(len(case.rounds))]
    quiet = own_answers(group, base, case, first, batches, [])
    busy = own_answers(group, base, case, first, batches, between)
    for left, right in zip(quiet, busy, strict=True):
        assert (left.metrics, left.error, left.flags) == (right.metrics, right.error, right.flags)
        for one, other in zip(left.logprobs, right.logprobs, strict=True):
            np.testing.assert_array_equal(one, other)
        assert left.tensors.keys() == right.tensors.keys()
        for name in left.tensors:
            np.testing.assert_array_equal(left.tensors[name], right.tensors[name], err_msg=name)
