"""Sessions, pins and lookups through `LLM`: what they keep, and that answers do not change by it."""

import time
from collections.abc import Iterator

import pytest

from pagedkv import LLM, Conflict, InvalidRequest, NotFound, SamplingParams
from tiny_llm import GREEDY, NUM_TOKENS, Checkpoint, Greedy, assert_at_rest

TURN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def own_llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    """An engine of the test's own, which ends without pins and sessions."""
    llm = LLM(**checkpoint.options)
    yield llm
    for session in llm.sessions():
        llm.delete_session(session.id)
    for pin in llm.pins():
        llm.unpin(pin.id)
    assert_at_rest(llm)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("append", [True, False])
def test_ten_turns_compute_what_is_new(checkpoint: Checkpoint, block_size: int, append: bool) -> None:
    options = checkpoint.options | {"num_blocks": 4096 // block_size, "block_size": block_size}
    llm, plain = LLM(**options), LLM(**options, enable_prefix_caching=False)
    known: list[int] = []
    for turn in range(10):
        new = plain.tokenizer.encode(f"the cat sat on turn {turn} and the dog " * 2)
        before = llm.stats()["scheduled_tokens"]
        if append and turn:
            output = llm.generate([new], TURN, use_tqdm=False, session_id="chat", append=True)[0]
        else:
            output = llm.generate([known + new], TURN, use_tqdm=False, session_id="chat")[0]
        assert output.prompt_token_ids == known + new
        # Of the generated tokens, the last one is not computed.
        num_recomputed = llm.stats()["scheduled_tokens"] - before - (TURN.max_tokens or 0) + 1
        # Up to a block more, as long as what the answer left of a block is not found again.
        assert num_recomputed <= len(new) + 1
        alone = plain.generate([known + new], TURN, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        known += new + output.outputs[0].token_ids
        assert llm.session_token_ids("chat") == known
    assert llm.session("chat").tokens == len(known)
    llm.delete_session("chat")
    assert_at_rest(llm)


def test_session_without_a_name_is_refused(llm: LLM) -> None:
    for arguments, message in (
        ({"append": True}, "append is True without session_id, allowed: only with it"),
        ({"session_ttl": 5.0}, "session_ttl is 5.0 without session_id, allowed: only with it"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate("the cat", TURN, use_tqdm=False, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"session_id": ""}, "session_id is '', allowed: a text of 1 to 256 characters"),
        ({"session_id": 5}, "session_id is 5, allowed: a text"),
        ({"session_id": "x" * 257}, "session_id is 'xxx"),
        ({"session_id": "\ud800"}, "session_id is '.ud800', allowed: a text without halves"),
        ({"session_id": "s", "session_ttl": 0}, "session_ttl is 0, allowed: a number of seconds above 0"),
        ({"session_id": "s", "session_ttl": 86_401}, "session_ttl is 86401, allowed: .* at most 86400"),
        ({"session_id": "s", "session_ttl": float("nan")}, "session_ttl is nan"),
        ({"session_id": "s", "session_ttl": float("inf")}, "session_ttl is inf"),
        ({"session_id": "s", "session_ttl": True}, "session_ttl is True"),
        ({"session_id": "s", "append": 1}, "append is 1, allowed: True or False"),
        ({"session_id": "s", "sampling_params": SamplingParams(n=2)}, "n is 2 with a session, allowed: 1"),
        (
            {"session_id": "s", "sampling_params": SamplingParams(best_of=2)},
            "best_of is 2 with a session, allowed: 1",
        ),
        ({"session_id": "s", "prompts": ["a", "b"]}, "session_id with 2 prompts, allowed: one"),
    ],
)
def test_refusals_leave_nothing_behind(llm: LLM, arguments: dict[str, object], message: str) -> None:
    given = {"prompts": "the cat", "sampling_params": TURN} | arguments
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(**given, use_tqdm=False)  # type: ignore[arg-type]
    assert (llm.sessions(), llm.stats()["blocks_promised"]) == ([], 0)


def test_an_append_that_is_too_long_leaves_the_session_free(own_llm: LLM, checkpoint: Checkpoint) -> None:
    own_llm.generate("the cat", TURN, use_tqdm=False, session_id="s")
    before = own_llm.session("s")
    for prompt, params in (
        ([5] * 500, TURN),
        ([5] * 600, TURN),
        ([checkpoint.vocab_size], TURN),
        ([5], SamplingParams(max_tokens=510)),
    ):
        with pytest.raises(InvalidRequest, match=r"maximum context|allowed: 0\.\."):
            own_llm.generate([prompt], params, use_tqdm=False, session_id="s", append=True)
    after = own_llm.session("s")
    assert (after.tokens, after.blocks) == (before.tokens, before.blocks)
    assert own_llm.stats()["blocks_promised"] == 0
    # An empty continuation goes on with the answer, here for as long as the context allows.
    whole = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    own_llm.generate([[]], whole, use_tqdm=False, session_id="s", append=True)
    assert own_llm.session("s").tokens == 512
    with pytest.raises(InvalidRequest, match="maximum context"):
        own_llm.generate([[]], whole, use_tqdm=False, session_id="s", append=True)


def test_names_that_do_not_exist(llm: LLM) -> None:
    for ask in (
        lambda: llm.session("x"),
        lambda: llm.session_token_ids("x"),
        lambda: llm.delete_session("x"),
        lambda: llm.fork_session("x", "y"),
        lambda: llm.generate("a", TURN, use_tqdm=False, session_id="x", append=True),
    ):
        with pytest.raises(NotFound, match='there is no session "x"; it may have expired'):
            ask()
    with pytest.raises(NotFound, match='there is no pin "x"'):
        llm.unpin("x")


def test_forks_share_blocks_and_part(own_llm: LLM) -> None:
    own_llm.generate("the cat sat on the mat " * 4, TURN, use_tqdm=False, session_id="a")
    held = own_llm.stats()["blocks_pinned"]
    fork = own_llm.fork_session("a", "b", ttl=50)
    assert (fork.tokens, fork.blocks) == (own_llm.session("a").tokens, own_llm.session("a").blocks)
    assert abs(fork.expires_at - time.time() - 50) < 5
    unnamed = own_llm.fork_session("a")
    assert [session.id for session in own_llm.sessions()] == ["a", "b", unnamed.id]
    assert own_llm.stats()["blocks_pinned"] == held
    with pytest.raises(Conflict, match='there is a session "b" already; delete it first'):
        own_llm.fork_session("a", "b")
    for name, text in (("a", " dog"), ("b", " log")):
        begun = own_llm.session_token_ids(name)
        prompt = begun + own_llm.tokenizer.encode(text, add_special_tokens=False)
        alone = own_llm.generate([prompt], TURN, use_tqdm=False)[0].outputs[0].token_ids
        own_llm.generate(text, TURN, use_tqdm=False, session_id=name, append=True)
        assert own_llm.session_token_ids(name) == prompt + alone


def test_a_session_ends_where_a_stop_string_cuts_its_answer(own_llm: LLM) -> None:
    whole = own_llm.generate("the log", GREEDY, use_tqdm=False)[0].outputs[0]
    for place in range(4, len(whole.text) - 4, 7):
        stop = whole.text[place : place + 3]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=stop)
        output = own_llm.generate("the log", params, use_tqdm=False, session_id="s")[0]
        assert output.outputs[0].stop_reason == stop
        token_ids = own_llm.session_token_ids("s")
        assert token_ids == output.prompt_token_ids + output.outputs[0].token_ids
        assert own_llm.session("s").blocks == -(-(len(token_ids) - 1) // 16) or len(token_ids) % 16 <= 1
        own_llm.check_invariants()


def test_chat_finds_its_session(own_llm: LLM) -> None:
    messages = [{"role": "user", "content": "the cat sat on the mat and the dog on the log " * 2}]
    first = own_llm.chat(messages, TURN, use_tqdm=False, session_id="chat")[0]
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "and?"}]
    second = own_llm.chat(messages, TURN, use_tqdm=False, session_id="chat", session_ttl=9.5)[0]
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 16
    assert abs(own_llm.session("chat").expires_at - time.time() - 9.5) < 5


def test_a_pinned_prompt_outlives_other_work(checkpoint: Checkpoint, expected: list[Greedy]) -> None:
    llm = LLM(**checkpoint.options | {"num_blocks": 60, "max_model_len": 400})
    assert llm.stats()["blocks_pin_budget"] == 15
    prompt = [4 + place % 50 for place in range(100)]
    pin = llm.pin(prompt, ttl=600)
    assert (pin.tokens, pin.blocks) == (100, 7)
    assert abs(pin.expires_at - time.time() - 600) < 5
    assert llm.pins() == [pin]
    assert llm.snapshot()["pinned"] == 7
    for offset in range(20):
        llm.generate([[(place + 3 * offset) % 200 + 4 for place in range(150)]], TURN, use_tqdm=False)
    assert llm.stats()["evictions"] > 60
    assert llm.generate([[*prompt, 7]], TURN, use_tqdm=False)[0].num_cached_tokens == 100
    assert llm.pins()[0].expires_at > pin.expires_at
    # The same prompt once more shares the blocks but for what does not fill one.
    again = llm.pin(prompt, ttl=600)
    assert llm.stats()["blocks_pinned"] <= 8
    with pytest.raises(
        InvalidRequest, match=r"the pin needs up to 10 more blocks of 16 tokens, but of the 15"
    ):
        llm.pin([9] * 150)
    llm.unpin(pin.id)
    llm.unpin(again.id)
    assert llm.pins() == []
    assert_at_rest(llm)


def test_pins_expire_by_themselves(own_llm: LLM) -> None:
    pin = own_llm.pin("the cat sat on the mat " * 4, ttl=0.05)
    own_llm.generate("the dog", TURN, use_tqdm=False, session_id="s", session_ttl=0.05)
    time.sleep(0.06)
    assert (own_llm.pins(), own_llm.sessions()) == ([], [])
    with pytest.raises(NotFound):
        own_llm.unpin(pin.id)
    assert_at_rest(own_llm)


def test_a_lookup_changes_nothing(own_llm: LLM) -> None:
    text = "the cat sat on the mat " * 8
    assert own_llm.lookup(text).cached_tokens == 0
    own_llm.generate(text, TURN, use_tqdm=False)
    before, stats = own_llm.snapshot(), own_llm.stats()
    found = own_llm.lookup(text)
    after = own_llm.snapshot()
    assert all((after.pop("ref_counts") == before.pop("ref_counts")).tolist())
    assert (after, own_llm.stats()) == (before, stats)
    assert found.tiers == {"device": found.cached_tokens}
    assert (found.admissible, found.reason) == (True, None)
    assert found.blocks_needed <= found.blocks_available
    # It foretells what the request itself finds.
    output = own_llm.generate(text, TURN, use_tqdm=False)[0]
    assert (output.num_cached_tokens, len(output.prompt_token_ids)) == (
        found.cached_tokens,
        found.prompt_tokens,
    )
    with pytest.raises(InvalidRequest, match="maximum context length"):
        own_llm.lookup([5] * 512)


def test_a_reset_forgets_what_was_computed(own_llm: LLM) -> None:
    text = "the cat sat on the mat " * 4
    own_llm.pin(text)
    own_llm.generate(text, TURN, use_tqdm=False, session_id="s")
    tokens = own_llm.session_token_ids("s")
    counts = own_llm.reset_prefix_cache()
    assert (counts.pins, counts.sessions) == (1, 1)
    assert counts.blocks > 0
    assert own_llm.lookup(text).cached_tokens == 0
    assert own_llm.pins() == []
    assert own_llm.session("s").blocks == 0
    assert_at_rest(own_llm)
    output = own_llm.generate(" and", TURN, use_tqdm=False, session_id="s", append=True)[0]
    assert output.num_cached_tokens == 0
    assert output.prompt_token_ids[: len(tokens)] == tokens


def test_exchanged_weights_find_nothing(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options)
    text = "the cat sat on the mat " * 4
    before = llm.generate(text, TURN, use_tqdm=False, session_id="s")[0]
    # The sign of every logit changes with that of the last norm.
    llm._engine.runner.model.get_parameter("model.norm.weight").data.neg_()
    llm.set_model_epoch(1)
    assert llm.session("s").blocks == 0
    assert llm.lookup(text).cached_tokens == 0
    after = llm.generate(text, TURN, use_tqdm=False)[0]
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids != before.outputs[0].token_ids
    assert llm.generate(text, TURN, use_tqdm=False)[0].num_cached_tokens > 0


def test_the_budget_is_an_option(checkpoint: Checkpoint) -> None:
    options = checkpoint.options | {"num_blocks": 40}
    with pytest.raises(
        ValueError, match="max_pinned_blocks is 9, allowed: 0 to 8, so that a sequence of max_model"
    ):
        LLM(**options, max_pinned_blocks=9)
    llm = LLM(**options, max_pinned_blocks=0)
    with pytest.raises(InvalidRequest, match=r"of the 0 that pins and sessions may have together"):
        llm.pin("the cat")
    plain = LLM(**options, enable_prefix_caching=False)
    with pytest.raises(InvalidRequest, match="enable_prefix_caching is off"):
        plain.pin("the cat")
    first = plain.generate("the cat", TURN, use_tqdm=False, session_id="s")[0]
    second = plain.generate(" sat", TURN, use_tqdm=False, session_id="s", append=True)[0]
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    assert plain.session("s").blocks == 0
