"""The workloads, as token ids, so that no tokenizer plays a part. Fixed output lengths; greedy but for W4.

Every run of a workload has other tokens, drawn from its number, so that no cache helps from run to run.
"""

import random
from dataclasses import dataclass

# Ordinary words of the demo model's vocabulary.
TOKENS = range(1000, 40000)


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens to generate, `samples` times."""

    prompt: list[int]
    num_tokens: int
    samples: int = 1


def _tokens(source: random.Random, length: int) -> list[int]:
    return [source.choice(TOKENS) for _ in range(length)]


def w1(run: int) -> list[Job]:
    """One request: 128 tokens in, 128 out."""
    return [Job(_tokens(random.Random(1000 + run), 128), 128)]


def w2(run: int) -> list[Job]:
    """32 requests at once: 32 to 512 tokens in, 16 to 256 out, the same lengths in every run."""
    lengths = random.Random(0)
    shapes = [(lengths.randint(32, 512), lengths.randint(16, 256)) for _ in range(32)]
    source = random.Random(2000 + run)
    return [Job(_tokens(source, prompt_len), num_tokens) for prompt_len, num_tokens in shapes]


def w3(run: int) -> list[Job]:
    """64 requests at once that share 1,024 tokens and have 32 of their own; 32 out."""
    source = random.Random(3000 + run)
    prefix = _tokens(source, 1024)
    return [Job(prefix + _tokens(source, 32), 32) for _ in range(64)]


def w4(run: int) -> list[Job]:
    """16 samples of one prompt of 512 tokens at temperature 1; 64 out."""
    return [Job(_tokens(random.Random(4000 + run), 512), 64, samples=16)]


def warm_up() -> list[Job]:
    """A short request that every engine answers before anything is timed."""
    return [Job(_tokens(random.Random(0), 128), 1)]


WORKLOADS = {"W1": w1, "W2": w2, "W3": w3, "W4": w4}
