"""What the generator promises of tokens, log-probs, batching and memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from sampling_runs import END, VOCAB, drain, forward_logprobs, greedy, request, run, tiny_llama
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tinsmith.actors.sampling.engines.builtin.generator import Generator
from tinsmith.actors.sampling.engines.builtin.sample import Finished
from tinsmith.bus.protocol.errors import InvalidInput, SequenceTooLong, UnknownVersion, UnsupportedModel

NEVER: dict[str, Any] = {"temperature": 0, "stop_tokens": ()}


def test_prompts_of_mixed_length_give_the_greedy_tokens_of_each_alone(model, prompts):
    answers = run(Generator(model), [request(str(i), p, max_tokens=20, **NEVER) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert answers[str(i)].sequences[0].tokens.tolist() == greedy(model, prompt, 20)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_requests_that_join_and_leave_between_tokens_change_no_other(prompts, attention):
    model = tiny_llama(attn_implementation=attention)
    generator = Generator(model, max_rows=3)
    answers: dict[str, Any] = {}
    lengths = [25, 3, 17, 8, 40, 1, 12, 30]
    for i, prompt in enumerate(prompts):
        generator.submit(request(str(i), prompt, max_tokens=lengths[i], **NEVER))
        for _ in range(2):
            answers |= {answer.id: answer for answer in generator.step()}
    answers |= drain(generator)
    for i, prompt in enumerate(prompts):
        assert answers[str(i)].sequences[0].tokens.tolist() == greedy(model, prompt, lengths[i])


def _windowed(kind: str) -> Any:
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "sliding_window": 6,
        "initializer_range": 0.3,
    }
    if kind == "gemma3":
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_hidden_layers=3, layer_types=types)).eval()
    return MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=2)).eval()


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
@pytest.mark.parametrize("prefill_tokens", [2048, 5])
def test_sliding_windows_are_kept_in_batches_of_mixed_length(kind, prefill_tokens, prompts):
    model = _windowed(kind)
    generator = Generator(model, prefill_tokens=prefill_tokens)
    answers = run(generator, [request(str(i), p, max_tokens=12, **NEVER) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        answer = answers[str(i)].sequences[0]
        expected = forward_logprobs(model, np.concatenate([prompt, answer.tokens]))[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        assert answer.tokens.tolist() == greedy(model, prompt, 12)


def test_learned_positions_work_as_rotary_ones_do(prompts):
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    answers = run(Generator(model), [request(str(i), p, max_tokens=10, **NEVER) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert answers[str(i)].sequences[0].tokens.tolist() == greedy(model, prompt, 10)


def test_a_model_without_keys_and_values_is_refused():
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(UnsupportedModel):
        Generator(MambaForCausalLM(config))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_sampled_log_probs_are_those_of_the_models_forward_at_the_temperature(model, prompts, temperature):
    requests = [
        request(str(i), p, max_tokens=24, n=2, temperature=temperature, seed=i, stop_tokens=())
        for i, p in enumerate(prompts)
    ]
    answers = run(Generator(model, max_rows=5), requests)
    for i, prompt in enumerate(prompts):
        for sequence in answers[str(i)].sequences:
            expected = forward_logprobs(model, np.concatenate([prompt, sequence.tokens]), temperature)
            np.testing.assert_allclose(sequence.logprobs, expected[len(prompt) - 1 :], atol=1e-4)


def test_greedy_log_probs_are_at_temperature_one(model, prompts):
    sequence = run(Generator(model), [request("a", prompts[4], max_tokens=9, **NEVER)])["a"].sequences[0]
    expected = forward_logprobs(model, np.concatenate([prompts[4], sequence.tokens]))[len(prompts[4]) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_log_probs_are_not_renormalised_by_truncation(model, prompts):
    args = {"max_tokens": 12, "stop_tokens": (), "top_k": 3, "top_p": 0.8, "seed": 1}
    sequence = run(Generator(model), [request("a", prompts[3], **args)])["a"].sequences[0]
    expected = forward_logprobs(model, np.concatenate([prompts[3], sequence.tokens]))[len(prompts[3]) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("prefill_tokens", [2048, 16, 1])
def test_prompt_log_probs_are_the_forwards_however_the_prompt_is_cut(model, prompts, prefill_tokens):
    requests = [request(str(i), p, max_tokens=1, prompt_logprobs=True, temperature=0.5) for i, p in enumerate(prompts)]
    answers = run(Generator(model, prefill_tokens=prefill_tokens), requests)
    for i, prompt in enumerate(prompts):
        scores = answers[str(i)].prompt_logprobs
        assert scores is not None
        assert scores.dtype == np.float32
        assert scores.shape == prompt.shape
        assert np.isnan(scores[0])
        np.testing.assert_allclose(scores[1:], forward_logprobs(model, prompt), atol=1e-4)


def test_prompt_log_probs_are_given_to_who_asks_alone(model, prompts):
    generator = Generator(model)
    plain = request("plain", prompts[5], max_tokens=4, **NEVER)
    asking = request("asking", prompts[5], max_tokens=4, n=3, prompt_logprobs=True, **NEVER)
    answers = run(generator, [plain, asking])
    assert answers["plain"].prompt_logprobs is None
    assert answers["asking"].prompt_logprobs is not None
    assert answers["plain"].sequences[0].tokens.tolist() == answers["asking"].sequences[2].tokens.tolist()


def test_a_seed_repeats_its_distinct_samples_whatever_else_runs(model, prompts):
    seeded = request("s", prompts[4], n=4, max_tokens=16, seed=11, stop_tokens=())
    alone = run(Generator(model), [seeded])["s"]
    crowd = [request(str(i), p, n=2, max_tokens=10 + i, stop_tokens=()) for i, p in enumerate(prompts)]
    crowded = run(Generator(model, max_rows=6), [*crowd[:4], seeded, *crowd[4:]])["s"]
    drawn = [sequence.tokens.tolist() for sequence in alone.sequences]
    assert drawn == [sequence.tokens.tolist() for sequence in crowded.sequences]
    assert len({tuple(tokens) for tokens in drawn}) == 4
    other = run(Generator(model), [request("s", prompts[4], n=4, max_tokens=16, seed=12, stop_tokens=())])["s"]
    assert drawn != [sequence.tokens.tolist() for sequence in other.sequences]


def test_without_a_seed_samples_differ_every_time(model, prompts):
    generator = Generator(model)
    free = {"n": 2, "max_tokens": 20, "stop_tokens": ()}
    answers = run(generator, [request("a", prompts[2], **free), request("b", prompts[2], **free)])
    assert len({tuple(s.tokens.tolist()) for id in "ab" for s in answers[id].sequences}) == 4


def _prompt_tokens_computed(model: Any, generator: Generator, requests: list[Any]) -> int:
    """Tokens in forwards of more than one column: prompts of the requests."""
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].numel() if inputs[0].shape[1] > 1 else 0)
    )
    try:
        run(generator, requests)
    finally:
        handle.remove()
    return sum(seen)


def test_samples_and_equal_prompts_share_one_prefill(model, prompts):
    generator = Generator(model, max_rows=4)
    requests = [request(str(i), prompts[6], n=3, max_tokens=5, **NEVER) for i in range(6)]
    assert _prompt_tokens_computed(model, generator, requests) == len(prompts[6])
    later = run(generator, [request("later", prompts[6], max_tokens=5, **NEVER)])["later"]
    assert later.cached_tokens == len(prompts[6])
    assert later.sequences[0].tokens.tolist() == greedy(model, prompts[6], 5)


def test_prompts_beyond_the_sharing_bound_are_dropped(model, prompts):
    generator = Generator(model, shared_tokens=0)
    again = [request("a", prompts[6], max_tokens=2, **NEVER)]
    assert _prompt_tokens_computed(model, generator, again) == len(prompts[6])
    assert _prompt_tokens_computed(model, generator, again) == len(prompts[6])
    assert generator.shared_tokens == 0


def test_a_cancelled_request_frees_its_rows_and_is_not_answered(model, prompts):
    generator = Generator(model, max_rows=2)
    generator.submit(request("long", prompts[1], n=5, max_tokens=200, **NEVER))
    generator.submit(request("short", prompts[2], max_tokens=3, **NEVER))
    for _ in range(3):
        assert generator.step() == []
    assert generator.live_rows == 2
    assert generator.cancel("long")
    assert generator.live_rows == 0
    assert not generator.cancel("long")
    answers = drain(generator)
    assert list(answers) == ["short"]
    assert answers["short"].sequences[0].tokens.tolist() == greedy(model, prompts[2], 3)


def test_no_row_or_memory_is_left_after_a_hundred_requests(model, prompts):
    generator = Generator(model, max_rows=6, shared_tokens=64)
    rng = np.random.default_rng(1)
    requests = [
        request(str(i), prompts[rng.integers(8)], n=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, 12)))
        for i in range(100)
    ]
    answers = run(generator, requests)
    assert len(answers) == 100
    assert all(len(answers[r.id].sequences) == r.args.n for r in requests)
    assert (generator.live_rows, generator.waiting_samples, generator.cache_bytes) == (0, 0, 0)
    assert generator.shared_tokens <= 64


def test_rows_that_outgrow_the_cache_wait_and_resume_with_the_same_tokens(model, prompts):
    requests = [request(str(i), p, max_tokens=70, seed=i, stop_tokens=()) for i, p in enumerate(prompts)]
    roomy = run(Generator(model), requests)
    generator = Generator(model, max_cache_tokens=256)
    for one in requests:
        generator.submit(one)
    answers, live = {}, []
    while generator.busy:
        answers |= {answer.id: answer for answer in generator.step()}
        live.append(generator.live_rows)
    assert any(later < earlier for earlier, later in itertools.pairwise(live))
    for one in requests:
        assert answers[one.id].sequences[0].tokens.tolist() == roomy[one.id].sequences[0].tokens.tolist()
        np.testing.assert_allclose(
            answers[one.id].sequences[0].logprobs, roomy[one.id].sequences[0].logprobs, atol=1e-4
        )


def test_the_end_token_is_part_of_the_tokens_and_can_be_switched_off(prompts):
    model = tiny_llama(tie_word_embeddings=False)
    end = greedy(model, prompts[3], 4)[2]
    model.generation_config.eos_token_id = [END, end]
    first = greedy(model, prompts[3], 4).index(end) + 1
    generator = Generator(model)
    answers = run(
        generator,
        [
            request("own", prompts[3], max_tokens=9, temperature=0),
            request("never", prompts[3], max_tokens=9, **NEVER),
            request("given", prompts[3], max_tokens=9, temperature=0, stop_tokens=(greedy(model, prompts[3], 1)[0],)),
        ],
    )
    assert answers["own"].sequences[0].tokens.tolist() == greedy(model, prompts[3], 4)[:first]
    assert answers["own"].sequences[0].stop_reason == "stop"
    assert len(answers["never"].sequences[0].tokens) == 9
    assert answers["never"].sequences[0].stop_reason == "length"
    assert len(answers["given"].sequences[0].tokens) == 1
    assert answers["given"].sequences[0].stop_reason == "stop"


def test_a_stop_string_over_token_borders_ends_the_sample(model, tokenizer):
    texts = ((token, tokenizer.decode(greedy(model, np.array([token]), 7))) for token in range(3, VOCAB))
    prompt, text = next((token, text) for token, text in texts if text.isascii() and len(text) == 7)
    stop = text[2:5]
    end = text.index(stop) + 3
    args = {"max_tokens": 7, "stop_strings": ("never seen", stop), **NEVER}
    sequence = run(Generator(model, tokenizer), [request("a", [prompt], **args)])["a"].sequences[0]
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == greedy(model, np.array([prompt]), 7)[:end]
    assert sequence.text == text[: end - 3]


def test_wrong_requests_are_refused_and_leave_nothing_behind(model, tokenizer):
    generator = Generator(model)
    cases = [
        (request("a", [], max_tokens=1), InvalidInput, "at least one token"),
        (request("a", [3, VOCAB], max_tokens=1), InvalidInput, f"token {VOCAB} at position 1"),
        (request("a", [-1], max_tokens=1), InvalidInput, "token -1 at position 0"),
        (request("a", [3] * 250, max_tokens=7), SequenceTooLong, "257 tokens; the limit is 256"),
        (request("a", [3], stop_tokens=(VOCAB,)), InvalidInput, "stop_tokens"),
        (request("a", [3], stop_strings=("x",)), InvalidInput, "tokenizer"),
        (request("a", [3], version="m/none"), UnknownVersion, "m/none"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            generator.submit(wrong)
    with pytest.raises(InvalidInput, match="empty"):
        Generator(model, tokenizer).submit(request("a", [3], stop_strings=("",)))
    assert not generator.busy
    generator.submit(request("a", [3] * 250, max_tokens=6))
    with pytest.raises(InvalidInput, match="under way"):
        generator.submit(request("a", [3], max_tokens=1))
    assert isinstance(drain(generator)["a"], Finished)


def test_closing_leaves_the_model_as_it_was(prompts):
    model = tiny_llama()
    generator = Generator(model)
    run(generator, [request("a", prompts[0], max_tokens=2)])
    generator.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
