"""A tiny checkpoint with a tokenizer, what transformers makes of it, and engines on it that come to rest.

`conftest.py` makes fixtures of it.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pagedkv import LLM, AsyncLLM, SamplingParams
from pagedkv.outputs import CompletionOutput, RequestOutput
from tiny_models import make_tiny
from tiny_tokenizers import CHATML, byte_level, save_directory

# The model's own end token. It is not among the answers below, so every one of them ends where it should.
EOS = 1
# Where the best two logits are closer than this, rounding may decide: torch's results depend on the batch.
TIE = 1e-3
# How long the answers of `expected` are, and how they are asked for.
NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Takes far longer than any test waits, unless it is ended.
LONG = SamplingParams(temperature=0, max_tokens=6000, ignore_eos=True)


@dataclass(frozen=True)
class Greedy:
    """What transformers answers, token by token, and by how much the best token wins."""

    prompt: list[int]
    token_ids: list[int]
    margins: list[float]

    def check(self, answer: CompletionOutput, num_tokens: int | None = None) -> None:
        """Asserts that an answer is the same, up to the first place where rounding decides."""
        expected = self.token_ids[:num_tokens]
        assert len(answer.token_ids) == len(expected)
        clear = next((i for i, margin in enumerate(self.margins) if margin < TIE), len(expected))
        assert clear > 0, "a comparison that compares nothing"
        assert answer.token_ids[:clear] == expected[:clear]


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, and the same in transformers."""

    path: Path
    reference: PreTrainedModel
    vocab_size: int

    @property
    def options(self) -> dict[str, Any]:
        """Options that a quick test wants."""
        return {
            "model": str(self.path),
            "device": "cpu",
            "threads": 1,
            "num_blocks": 400,
            "max_model_len": 512,
        }

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Greedy:
        """Continues a prompt by the most likely tokens, computing everything anew for each."""
        ids, margins = list(prompt), []
        for _ in range(num_tokens):
            best = self.reference(torch.tensor([ids])).logits[0, -1].float().topk(2)
            ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return Greedy(list(prompt), ids[len(prompt) :], margins)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the next token after every token: [len(token_ids), vocab]."""
        logits: torch.Tensor = self.reference(torch.tensor([list(token_ids)])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def with_eos(self, path: Path, eos: int) -> Path:
        """A copy whose end token is another one."""
        shutil.copytree(self.path, path)
        for name in ("config.json", "generation_config.json"):
            fields = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(fields | {"eos_token_id": eos}))
        return path


def make_checkpoint(path: Path) -> Checkpoint:
    """Writes a tiny Llama with a byte-level tokenizer and a ChatML template."""
    backend = byte_level()
    vocab_size = backend.get_vocab_size()
    save_directory(path, backend, {"chat_template": CHATML, "bos_token": "<s>", "eos_token": "</s>"})
    reference = make_tiny("llama", path, vocab_size=vocab_size, bos_token_id=0, eos_token_id=EOS, seed=3)
    return Checkpoint(path, reference, vocab_size)


def prompts(num: int, vocab_size: int, seed: int = 5) -> list[list[int]]:
    """Random prompts of 1 to 100 tokens, every other one beginning as the one before it does."""
    generator = torch.Generator().manual_seed(seed)
    made: list[list[int]] = []
    for idx in range(num):
        length = int(torch.randint(1, 101, (1,), generator=generator))
        ids: list[int] = torch.randint(4, vocab_size, (length,), generator=generator).tolist()
        made.append(made[-1][: len(ids)] + ids[len(made[-1]) :] if idx % 2 else ids)
    return made


def sampled(seed: int | None = None, n: int = 1, **changes: Any) -> SamplingParams:
    """Parameters of an answer that is drawn."""
    return SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=seed, n=n, **changes)


def texts(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """The token ids of all answers to all prompts."""
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def check_all(llm: LLM, expected: Sequence[Greedy]) -> None:
    """Asserts that prompts, run together, get their answers and leave nothing behind."""
    outputs = llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    for output, one in zip(outputs, expected, strict=True):
        assert output.finished
        assert output.prompt_token_ids == one.prompt
        assert output.outputs[0].finish_reason == "length"
        one.check(output.outputs[0])
    assert_at_rest(llm)


def assert_at_rest(llm: LLM) -> None:
    """Asserts that no block is used and the rules of the cache hold."""
    llm.check_invariants()
    snapshot = llm.snapshot()
    assert (snapshot["owned"], snapshot["fenced"], snapshot["sequences"]) == (0, 0, [])


async def at_rest(llm: AsyncLLM) -> None:
    """Waits until nothing is in flight, then asserts the same."""
    while (snapshot := await llm.snapshot())["sequences"]:
        await asyncio.sleep(0.01)
    assert (snapshot["owned"], snapshot["fenced"]) == (0, 0)
    assert llm.num_in_flight == 0
    await llm.check_invariants()


def async_engine(checkpoint: Checkpoint, **changes: Any) -> AsyncLLM:
    """An `AsyncLLM` with room for `LONG`."""
    return AsyncLLM(**checkpoint.options | {"num_blocks": 2000, "max_model_len": 8000} | changes)


async def last(outputs: AsyncIterable[RequestOutput]) -> RequestOutput:
    """The last item of a stream."""
    output = None
    async for output in outputs:  # noqa: B007 - only the last one matters
        pass
    assert output is not None, "the stream was empty"
    return output
