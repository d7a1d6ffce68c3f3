"""Samples in parts: the parts make up the whole, and asking for them changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_runs import forward_logprobs, request, run

from tinsmith.actors.sampling.engines.builtin.generator import Generator
from tinsmith.actors.sampling.engines.builtin.prefill import Prefill
from tinsmith.actors.sampling.engines.builtin.sample import Finished, SampleRequest
from tinsmith.bus.protocol.commands import SampleArgs
from tinsmith.bus.protocol.errors import CommandFailed
from tinsmith.bus.protocol.parts import Part, Told, pack_parts, unpack_parts


def streamed(generator: Generator, *requests: SampleRequest) -> tuple[dict[str, Finished], dict[str, list[Part]]]:
    """Answers and parts by request, the parts asked for after every step."""
    answers, parts = {}, {one.id: [] for one in requests}
    for one in requests:
        generator.submit(one)
    while generator.busy:
        for answer in generator.step():
            answers[answer.id] = answer
            parts[answer.id] += answer.parts
        for one in requests:
            parts[one.id] += unpack_parts(pack_parts(generator.parts(one.id)))
    return answers, parts


def test_the_parts_of_every_sample_make_up_its_whole(model, tokenizer, prompts):
    asked = {"n": 3, "max_tokens": 12, "seed": 4, "stop_strings": ("a", "zz"), "topk": 2}
    requests = [request(str(i), p, stream=True, **asked) for i, p in enumerate(prompts)]
    answers, parts = streamed(Generator(model, tokenizer, max_rows=5, max_cache_tokens=400), *requests)
    plain = run(Generator(model, tokenizer), [request(str(i), p, **asked) for i, p in enumerate(prompts)])
    for id, answer in answers.items():
        assert [s.tokens.tolist() for s in answer.sequences] == [s.tokens.tolist() for s in plain[id].sequences]
        for index, whole in enumerate(answer.sequences):
            mine = [part for part in parts[id] if part.index == index]
            assert [part.at for part in mine] == list(range(len(whole.tokens)))
            assert [token for part in mine for token in part.tokens] == whole.tokens.tolist()
            np.testing.assert_array_equal(np.float32([p for part in mine for p in part.logprobs]), whole.logprobs)
            assert "".join(part.text for part in mine) == whole.text
            assert [part.stop_reason for part in mine] == [None] * (len(mine) - 1) + [whole.stop_reason]
            assert [[token for token, _ in part.topk[0]] for part in mine] == whole.topk[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_draws_for_the_prompt_follow_the_models_distribution_at_the_temperature(model, prompts, temperature):
    prompt, k = prompts[5], 256
    asked = {"max_tokens": 1, "prompt_draws": k, "temperature": temperature, "seed": 3}
    generator = Generator(model, prefill_tokens=4)
    answers = run(generator, [request("a", prompt, **asked), request("b", prompt, **asked)])
    tokens, logprobs = answers["a"].extras.draws
    assert tokens.shape == logprobs.shape == (len(prompt) - 1, k)
    np.testing.assert_array_equal(tokens, answers["b"].extras.draws[0])
    whole = run(Generator(model), [request("c", prompt, **asked)])["c"].extras.draws
    np.testing.assert_array_equal(whole[0], tokens)
    for at in range(len(prompt) - 1):
        # The log-prob of a drawn token is the model's own in that place.
        other = np.concatenate([prompt[: at + 1], tokens[at, :1]])
        assert logprobs[at, 0] == pytest.approx(forward_logprobs(model, other)[-1], abs=1e-4)
        # The likeliest token is drawn about as often as the distribution says: 5 standard deviations.
        asked_there = {"max_tokens": 1, "topk": 1, "temperature": temperature}
        likeliest = run(Generator(model), [request("p", prompt[: at + 1], **asked_there)])["p"].sequences[0].topk
        share = float((tokens[at] == likeliest[0][0, 0]).mean())
        p = float(np.exp(likeliest[1][0, 0])) if temperature else 1.0
        assert abs(share - p) <= 5 * np.sqrt(p * (1 - p) / k)


def test_draws_differ_by_seed_and_are_nobody_elses_without_one(model, prompts):
    asked = {"max_tokens": 1, "prompt_draws": 8}
    generator = Generator(model)
    requests = [request("1", prompts[7], seed=1, **asked), request("2", prompts[7], seed=2, **asked)]
    requests += [request("x", prompts[7], **asked), request("y", prompts[7], **asked)]
    drawn = [answer.extras.draws[0].tobytes() for answer in run(generator, requests).values()]
    assert len(set(drawn)) == 4


def test_arguments_that_make_no_sense_for_draws_are_refused():
    with pytest.raises(ValueError, match="256"):
        SampleArgs(prompt_draws=257)


def test_a_reader_is_told_each_token_once_whatever_comes_twice_or_not_at_all():
    def part(at, *tokens, reason=None):
        return Part(0, at, list(tokens), [0.0] * len(tokens), "".join(chr(96 + t) for t in tokens), reason)

    whole = part(0, 1, 2, 3, 4, 5, reason="length")
    told = Told(0)
    seen = [told.take(it) for it in (part(0, 1), part(1, 2), part(0, 1), part(1, 2), part(3, 4))]
    seen.append(told.rest(whole))
    assert [it for it in seen if it is not None] == [part(0, 1), part(1, 2), part(2, 3, 4, 5, reason="length")]
    assert told.rest(whole) is None
    other = Told(0)
    other.take(part(0, 9))
    with pytest.raises(CommandFailed):
        other.rest(whole)


def test_a_prefill_that_fails_is_not_tried_for_ever(model, prompts, monkeypatch):
    """The owner gives up what is under way; the next request is served."""
    generator = Generator(model)
    generator.submit(request("bad", prompts[3], max_tokens=2))
    monkeypatch.setattr(Prefill, "advance", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        generator.step()
    monkeypatch.undo()
    assert generator.cancel("bad")
    assert not generator.busy
    assert run(generator, [request("good", prompts[2], max_tokens=2)])["good"].sequences
