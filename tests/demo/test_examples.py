"""What the demo's examples promise to those who copy them."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.api import SampledSequence
from tinsmith.ops.demo.tasks import Task, reversals, sums
from tinsmith.ops.examples import rl_loop, supervised


def _answer(text: str, reason: str = "stop") -> SampledSequence:
    return SampledSequence(np.array([7, 8, 9], np.int32), np.array([-1.0, -2.0, -3.0], np.float32), reason, text)


@pytest.mark.parametrize("task", [sums(), reversals()], ids=["sums", "reversals"])
def test_no_held_out_problem_is_trained_on(task: Task) -> None:
    lessons = [prompt for batch in task.lessons.batches for prompt, _ in batch] if task.lessons else []
    trained = {problem.prompt for problem in task.problems} | set(lessons)
    assert len(task.held_out) == 20
    assert len(task.problems) == 80
    assert trained.isdisjoint(problem.prompt for problem in task.held_out)


def test_every_held_out_sum_is_the_answer_of_some_training_problem() -> None:
    task = sums()
    assert {problem.answer for problem in task.held_out} <= {problem.answer for problem in task.problems}


def test_a_reward_needs_the_exact_answer_and_an_end_of_its_own() -> None:
    problem = rl_loop.Problem("3 + 4 =", "7")
    assert problem.reward(_answer(" 7")) == 1.0
    assert problem.reward(_answer(" 7", "length")) == 0.0
    assert problem.reward(_answer(" 71")) == 0.0
    assert problem.reward(_answer("")) == 0.0


def test_each_position_of_a_rollout_predicts_the_next_token_and_the_prompt_bears_no_loss() -> None:
    datum = rl_loop.to_datum([1, 2, 3], _answer("x"), advantage=0.5)
    assert datum.tokens.tolist() == [1, 2, 3, 7, 8]
    assert datum.inputs["target_tokens"].tolist() == [2, 3, 7, 8, 9]
    assert datum.inputs["logprobs"].tolist() == [0, 0, -1, -2, -3]
    assert datum.inputs["advantages"].tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert datum.inputs["mask"].tolist() == [0, 0, 1, 1, 1]


class _Letters:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


def test_only_the_completion_of_a_lesson_bears_loss() -> None:
    datum = supervised.to_datum(_Letters(), "ab", "cd")
    assert datum.tokens.tolist() == [0, 97, 98, 99]
    assert datum.inputs["target_tokens"].tolist() == [97, 98, 99, 100]
    assert datum.inputs["weights"].tolist() == [0, 0, 1, 1]
