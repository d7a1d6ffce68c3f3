"""A small random model, and a service as a user starts one, for tests of the whole."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 160
CONTEXT = 256


CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer() -> Any:
    """Three special tokens, then ASCII and some other bytes, one token a byte: VOCAB in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ascii_first = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (len(c.encode()), c))
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    # Bytes of "é" and "€" take part, so that a character can be split between tokens.
    wanted = [*ascii_first[:94], *(c for c in ("Ã", "©", "â", "Ĥ", "¬")), "Ġ", "Ċ"]
    for c in dict.fromkeys([*wanted, *ascii_first]):
        if len(vocab) < VOCAB:
            vocab[c] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = CHAT
    return made


def make_tiny_model(path: Path) -> Path:
    """A random two-layer Llama of VOCAB tokens and CONTEXT positions with its tokenizer, the same at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=False,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        )
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@dataclass
class Service:
    """A `tinsmith serve` process that has said it is ready."""

    process: subprocess.Popen[str]
    state: Path
    log: Path
    ready_line: str
    seconds: float
    """From the start of the process to the ready line."""

    def stop(self, number: int = signal.SIGTERM, *, insist: float | None = None) -> float:
        """Ask it to end, once or every `insist` seconds until it has; returns the seconds it took."""
        begun = time.monotonic()
        while True:
            self.process.send_signal(number)
            try:
                self.process.wait(30 if insist is None else insist)
                return time.monotonic() - begun
            except subprocess.TimeoutExpired:
                if time.monotonic() - begun > 30:
                    raise

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


def start_service(
    model: Path, state: Path, *options: str, env: dict[str, str] | None = None, timeout: float = 150.0
) -> Service:
    """Start a service on `state` and wait for its ready line."""
    state.mkdir(parents=True, exist_ok=True)
    log = state / "serve.log"
    door = [] if "--port" in options else ["--no-http"]
    command = [
        sys.executable,
        "-m",
        "tinsmith.api.cli",
        "serve",
        "--model",
        str(model),
        "--state",
        str(state),
        *door,
    ]
    begun = time.monotonic()
    with log.open("a") as err:
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    assert process.stdout is not None
    line = ""
    while not line.startswith("ready "):
        left = begun + timeout - time.monotonic()
        readable, _, _ = select.select([process.stdout], [], [], max(left, 0))
        line = process.stdout.readline() if readable else ""
        if not line:
            # Asked, not killed: it takes its bus server and its actors down.
            process.terminate()
            process.wait(60)
            raise AssertionError(f"no ready line within {timeout:g} s; its log:\n{log.read_text()[-4000:]}")
    return Service(process, state, log, line.strip(), time.monotonic() - begun)


def processes_of(state: Path) -> list[str]:
    """Command lines of live processes that name this state directory or descend from its service's Ray session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if re.search(re.escape(str(state)) + r"(\s|/|$)", words):
            found.append(words)
    return found


def run_cli(*args: str, env: dict[str, str] | None = None, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run `tinsmith ARGS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tinsmith.api.cli", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        check=False,
    )
