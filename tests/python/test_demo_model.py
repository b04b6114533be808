"""The demo model, SmolLM2-135M, end to end: the tokens of transformers, and an answer that makes sense."""

import pytest
import torch

from beam_reference import check_beams, hf_beams
from pagedkv import LLM, BeamSearchParams, SamplingParams
from tiny_models import hf_from_demo

NUM_TOKENS = 64
# Where the best two logits are closer than this, rounding decides which is taken.
TIE = 1e-3
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "Q: What is 12 times 12?\nA:",
    "In 1969, the first humans",
    "Die Hauptstadt von Deutschland ist",
    "Dear Sir or Madam,\n\n",
    "1, 1, 2, 3, 5, 8,",
    "Photosynthesis is the process by which",
    "<h1>Welcome</h1>\n<p>",
    "The opposite of hot is",
    "Roses are red, violets are",
    "Größe, naïve, 你好:",
    "The quick brown fox jumps over the lazy dog. " * 6,
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    return LLM(dtype="float32", device="cpu", threads=1, max_model_len=1024, kv_memory="512MiB")


def test_beam_searches_equal_transformers(llm):
    """A peaked distribution and a large vocabulary, where the tiny models have neither."""
    reference = hf_from_demo()
    eos = sorted({*llm.model_config.eos_token_ids, *llm.tokenizer.eos_token_ids})
    # A question of the chat template ends soon; a text goes on to the end.
    chat = llm.tokenizer.chat_prompt([{"role": "user", "content": "What is 2 plus 2?"}])
    asked = [
        (chat, 8, 24, {}),
        (PROMPTS[0], 4, 16, {"early_stopping": True}),
        (PROMPTS[5], 2, 20, {"length_penalty": 0.0}),
    ]
    num_stopped = 0
    for prompt, width, max_tokens, options in asked:
        (output,) = llm.beam_search([prompt], BeamSearchParams(width, max_tokens, **options))
        expected = hf_beams(reference, output.prompt_token_ids, width, max_tokens, eos, **options)
        num_stopped += check_beams(output, expected, options.get("length_penalty", 1.0))
    assert num_stopped > 0
    llm.check_invariants()


def test_greedy_tokens_equal_transformers(llm):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    reference = hf_from_demo()
    num_compared = 0
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        # One pass over prompt and answer shows what transformers would have taken at every place before.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()
        best = logits.topk(2)
        for token_id, values, indices in zip(answer, best.values, best.indices, strict=True):
            if values[0] - values[1] < TIE:
                assert token_id in indices
            else:
                assert token_id == int(indices[0])
                num_compared += 1
    assert num_compared > 0.99 * NUM_TOKENS * len(PROMPTS)
    llm.check_invariants()


def test_the_capital_of_france(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
    assert "Paris" in answer.text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in answer.text
    assert llm.tokenizer.token(answer.token_ids[-1]) == "<|im_end|>"
