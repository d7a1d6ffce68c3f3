"""Where a sample ends, and which text it gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_runs import END, VOCAB

from tinsmith.actors.sampling.engines.builtin.stopping import Detokenizer, StopRule, VisibleText


def fed(tokenizer: Any, text: str | list[int], **args: Any) -> tuple[int, str | None, str]:
    """Tokens taken, the reason, and the final text for a continuation given token by token."""
    tokens = tokenizer.encode(text) if isinstance(text, str) else text
    rule = StopRule(
        tokenizer,
        tokenizer.encode("ab"),
        stop_tokens=frozenset(args.get("stop_tokens", ())),
        stop_strings=args.get("stop_strings", ()),
        max_tokens=args.get("max_tokens", 1000),
    )
    for count, token in enumerate(tokens, 1):
        reason = rule.after(token)
        if reason is not None:
            return count, reason, rule.text(tokens[:count])
    return len(tokens), None, rule.text(tokens)


def test_a_stop_string_is_found_over_token_borders(tokenizer):
    assert fed(tokenizer, "one, two, three", stop_strings=("two",)) == (8, "stop", "one, ")


def test_the_first_of_several_stop_strings_ends_the_sample(tokenizer):
    assert fed(tokenizer, "xxhello", stop_strings=("hello", "ell")) == (6, "stop", "xxh")


def test_text_of_the_prompt_is_no_part_of_a_stop_string(tokenizer):
    assert fed(tokenizer, "babx", stop_strings=("ab",)) == (3, "stop", "b")


def test_a_character_split_between_tokens_can_be_in_a_stop_string(tokenizer):
    assert len(tokenizer.encode("é€")) == 5
    assert fed(tokenizer, "né€nn", stop_strings=("é€n",)) == (7, "stop", "n")


def test_a_stop_string_before_an_unfinished_character_is_seen_at_once(tokenizer):
    unfinished = tokenizer.encode("é")[:1]
    tokens = [*tokenizer.encode("x"), *unfinished, *tokenizer.encode("stop"), *tokenizer.encode("yy")]
    assert fed(tokenizer, tokens, stop_strings=("stop",))[:2] == (6, "stop")


def test_a_stop_token_is_counted_and_left_out_of_the_text(tokenizer):
    tokens = [*tokenizer.encode("hey"), END, *tokenizer.encode("more")]
    assert fed(tokenizer, tokens, stop_tokens=(END,)) == (4, "stop", "hey")
    assert fed(tokenizer, tokens) == (8, None, "heymore")


def test_a_special_token_can_be_a_stop_string(tokenizer):
    tokens = [*tokenizer.encode("hey"), END, *tokenizer.encode("more")]
    assert fed(tokenizer, tokens, stop_strings=("</s>",)) == (4, "stop", "hey")


def test_a_stop_at_the_last_token_allowed_is_a_stop(tokenizer):
    assert fed(tokenizer, "abc", stop_strings=("c",), max_tokens=3) == (3, "stop", "ab")
    assert fed(tokenizer, "abcd", max_tokens=3) == (3, "length", "abc")


@pytest.mark.parametrize("text", ["plain words", " leading", "né€é end", "€"])
def test_text_given_token_by_token_is_the_text_of_all_tokens(tokenizer, text):
    one = Detokenizer(tokenizer, tokenizer.encode("p"), skip_special=False)
    for token in tokenizer.encode(text):
        seen = one.feed([token])
    assert seen == text


def test_a_stop_string_that_a_hidden_special_token_parts_is_not_where_the_text_ends(tokenizer):
    tokens = [*tokenizer.encode("xa"), END, *tokenizer.encode("b,ab")]
    assert fed(tokenizer, tokens, stop_strings=("ab",)) == (7, "stop", "xab,")


def shown(tokenizer: Any, tokens: list[int], stop_strings: tuple[str, ...]) -> tuple[list[str], str]:
    """What is shown after each token of a sample that ends as its rule says, and its final text."""
    prompt = tokenizer.encode("ab")
    rule = StopRule(tokenizer, prompt, stop_tokens=frozenset(), stop_strings=stop_strings, max_tokens=len(tokens))
    visible = VisibleText(tokenizer, prompt, stop_strings)
    pieces = []
    for count, token in enumerate(tokens, 1):
        if rule.after(token) is not None:
            final = rule.text(tokens[:count])
            return [*pieces, visible.rest(final)], final
        pieces.append(visible.feed(token))
    raise AssertionError("the sample did not end")


def test_what_may_become_a_stop_string_or_half_a_character_is_not_shown_yet(tokenizer):
    assert shown(tokenizer, tokenizer.encode("n-enxend"), ("end",)) == (["n", "-", "", "", "enx", "", "", ""], "n-enx")
    assert shown(tokenizer, tokenizer.encode("aé!"), ()) == (["a", "", "é", "!"], "aé!")
    assert shown(tokenizer, tokenizer.encode("a\nUs"), ("\nUser:",)) == (["a", "", "", "\nUs"], "a\nUs")


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.lists(st.text("abé\n ", min_size=1, max_size=3))
)
def test_pieces_of_any_tokens_make_up_the_final_text(tokenizer, tokens, stops):
    pieces, final = shown(tokenizer, tokens, tuple(stops))
    assert "".join(pieces) == final


@given(st.text("abcé€\n <>/s", max_size=60), st.lists(st.text("abé\n </s>", min_size=1, max_size=4), max_size=3))
def test_pieces_of_likely_texts_make_up_the_final_text(tokenizer, text, stops):
    tokens = tokenizer.encode(text) or [5]
    pieces, final = shown(tokenizer, tokens, tuple(stops))
    assert "".join(pieces) == final
