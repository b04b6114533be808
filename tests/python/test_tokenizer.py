"""Tokenizers from directories equal transformers', those from GGUF metadata what the metadata describes."""

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoTokenizer

import tiny_tokenizers as tiny
from pagedkv.errors import ModelError, PagedKVError
from pagedkv.gguf_header import read_metadata
from pagedkv.models import ModelSource
from pagedkv.text import TextError, Tokenizer

DEMO = Tokenizer.load(tiny.demo_model())
BACKENDS = {
    "byte_level": lambda: tiny.byte_level(),
    "byte_level_bos": lambda: tiny.with_bos(tiny.byte_level()),
    "llama3": lambda: tiny.with_bos(tiny.byte_level(tiny.LLAMA3_PATTERN)),
    "sentencepiece": lambda: tiny.sentencepiece(),
    "sentencepiece_bos": lambda: tiny.with_bos(tiny.sentencepiece()),
    "metaspace_bos": lambda: tiny.with_bos(tiny.sentencepiece(metaspace=True)),
}


def assert_equal_to_transformers(tokenizer: Tokenizer, reference: Any, texts: list[str]) -> None:
    for text in texts:
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens)
            assert ids == reference.encode(text, add_special_tokens=add_special_tokens), (
                text,
                add_special_tokens,
            )
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
    assert tokenizer.special_tokens == dict(reference.special_tokens_map)
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_directories_equal_transformers(name: str, tmp_path: Path) -> None:
    source = tiny.save_directory(tmp_path, BACKENDS[name]())
    assert_equal_to_transformers(
        Tokenizer.load(source), AutoTokenizer.from_pretrained(str(tmp_path)), tiny.TEXTS
    )


def test_tokens_declared_beside_tokenizer_json_are_added(tmp_path: Path) -> None:
    backend = tiny.with_bos(tiny.byte_level())
    size = backend.get_vocab_size()
    config = {
        "added_tokens_decoder": {
            str(size): {"content": "<|late|>", "special": True, "normalized": False},
            str(backend.token_to_id("<tool>")): {"content": "<tool>", "special": True, "normalized": False},
        },
        "pad_token": "<|pad|>",
        "unk_token": {"__type": "AddedToken", "content": "<|unk|>", "special": True},
        "additional_special_tokens": ["<|extra|>", "<|end|>"],
        "image_token": "<|image|>",
        "clean_up_tokenization_spaces": True,
    }
    source = tiny.save_directory(tmp_path, backend, config)
    tokenizer = Tokenizer.load(source)
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [*tiny.TEXTS, "a<|late|> <|pad|>b<|unk|><|extra|><tool>the<|image|>."]
    assert_equal_to_transformers(tokenizer, reference, texts)
    assert tokenizer.special_ids >= {size, backend.token_to_id("<tool>"), tokenizer.token_id("<|image|>")}


def test_special_tokens_of_older_checkpoints(tmp_path: Path) -> None:
    source = tiny.save_directory(tmp_path, tiny.byte_level())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    bos = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": bos, "eos_token": "<|end|>"}))
    tokenizer = Tokenizer.load(source)
    assert_equal_to_transformers(tokenizer, AutoTokenizer.from_pretrained(str(tmp_path)), tiny.TEXTS)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}


def test_truncation_and_padding_in_tokenizer_json_do_nothing(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.load(tiny.save_directory(tmp_path, backend))
    text = "the capital of France"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < 64


def test_tokenizer_json_decides_over_the_class_name(tmp_path: Path) -> None:
    """Some classes of transformers rebuild the pre-tokenizer: SmolLM2's loses the cut between digits."""
    backend = tiny.byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    source = tiny.save_directory(tmp_path, backend, {"tokenizer_class": "GPT2Tokenizer"})
    tokenizer = Tokenizer.load(source)
    assert [tokenizer.token(i) for i in tokenizer.encode("it's 2024")][-4:] == ["2", "0", "2", "4"]


def test_directories_without_tokenizer_json_are_converted(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    tiny.save_directory(tmp_path, backend, {"tokenizer_class": "GPT2Tokenizer", "chat_template": tiny.CHATML})
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    tokenizer = Tokenizer.load(tiny.directory(tmp_path))
    text = "the cat sat on the mat, 2024"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_templates.names == ["default"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"model_type": "llama"}', "there is no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
    ],
)
def test_directories_without_a_tokenizer_are_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tiny.directory(tmp_path))


def test_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    source = tiny.save_directory(tmp_path, tiny.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{nonsense")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read as JSON"):
        Tokenizer.load(source)


def test_loading_the_demo_model_imports_neither_torch_nor_transformers() -> None:
    source = tiny.demo_model()
    program = (
        "import sys\nfrom types import SimpleNamespace\nfrom pagedkv.text import Tokenizer\n"
        f"source = SimpleNamespace(path={str(source.path)!r}, kind='gguf', name='demo')\n"
        "tokenizer = Tokenizer.load(source)\n"
        "tokenizer.chat_prompt([{'role': 'user', 'content': 'Hi'}])\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_demo_model_cuts_numbers_into_digits() -> None:
    def tokens(text: str) -> list[str]:
        return [DEMO.token(token_id) for token_id in DEMO.encode(text)]

    assert tokens("2024") == ["2", "0", "2", "4"]
    assert tokens("in 2024, x12") == ["in", " ", "2", "0", "2", "4", ",", " x", "1", "2"]
    assert tokens("It's the capital") == ["It", "'s", " the", " capital"]
    assert tokens("a  b\n\n c") == ["a", " ", " b", "\n\n", " c"]


def test_demo_model_knows_its_special_tokens() -> None:
    assert DEMO.vocab_size == 49152
    assert DEMO.special_ids == frozenset(range(17))
    assert (DEMO.special_tokens["eos_token"], DEMO.eos_token_ids) == ("<|im_end|>", (2,))
    assert DEMO.special_tokens["bos_token"] == "<|im_start|>"
    assert DEMO.encode("<|im_start|>user\nHi<|im_end|>") == [1, *DEMO.encode("user\nHi"), 2]
    # add_bos_token is false in the file.
    assert DEMO.encode("") == []


def test_demo_model_renders_its_chat_template() -> None:
    text = DEMO.chat_text([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = DEMO.chat_prompt([{"role": "user", "content": "Hi"}])
    assert ids == DEMO.encode(text, add_special_tokens=False)
    assert ids.count(1) == 3


@tiny.UNTIMED
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    tokenizer = BYTE_LEVEL
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


BYTE_LEVEL = tiny.paged(tiny.byte_level())


def test_ids_outside_the_vocabulary_leave_nothing() -> None:
    for token_id in (-1, DEMO.vocab_size, 2**31, 2**32, 2**70):
        assert DEMO.token(token_id) == ""
        assert DEMO.token_bytes(token_id) == b""
        assert not DEMO.has_token(token_id)
    assert DEMO.decode([DEMO.vocab_size, *DEMO.encode("Hi"), -1]) == "Hi"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TextError, match=r"lone surrogate \(U\+D83D\) at character 2"):
        DEMO.encode("ab\ud83d")
    with pytest.raises(PagedKVError):
        DEMO.chat_prompt([{"role": "user", "content": "\udc00"}])


def test_long_texts_give_the_same_ids() -> None:
    text = "".join(tiny.TEXTS) * 200 + "<|im_start|>user\n" * 100
    for add_special_tokens in (True, False):
        expected = DEMO.backend.encode(text, add_special_tokens=add_special_tokens).ids
        assert DEMO.encode(text, add_special_tokens) == expected


def test_encoding_a_long_text_lets_other_threads_run() -> None:
    text = "The cat sat, 123 on " * 20_000
    encoding = threading.Thread(target=DEMO.encode, args=[text])
    encoding.start()
    num_ticks = 0
    while encoding.is_alive():
        time.sleep(0.001)
        num_ticks += 1
    # If the tokenizer kept the interpreter, this loop would get to run before and after.
    assert num_ticks > 10


@pytest.mark.parametrize("kind", ["demo", "byte_level", "sentencepiece", "qwen2"])
def test_the_fewest_tokens_are_never_more_than_there_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.text.tokenizer._FEW_CHARS", 0)
    if kind == "demo":
        tokenizer = DEMO
    elif kind == "byte_level":
        tokenizer = BYTE_LEVEL
    elif kind == "sentencepiece":
        tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "m.gguf"))
    else:
        keys = tiny.byte_level_keys(tiny.byte_level())
        tokenizer = Tokenizer.load(tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre="qwen2", **keys))
    texts = [*tiny.TEXTS, "\u1f82" * 50, "\u03b1\u0313\u0300\u0345" * 50, "the cat sat on the mat " * 20]
    for text in texts:
        fewest, ids = tokenizer.fewest_tokens(text), tokenizer.encode(text, add_special_tokens=False)
        assert fewest <= len(ids)
    # Bytes that the demo model's vocabulary does not have leave no token.
    assert tokenizer.fewest_tokens("\x04" * 10_000) <= len(tokenizer.encode("\x04" * 10_000, False))
    assert tokenizer.fewest_tokens("x" * 10_000) > 10


def test_nothing_is_said_where_a_token_may_stand_for_any_length() -> None:
    assert tiny.paged(tiny.neighbour_dependent()).fewest_tokens("x" * 10_000) == 0
    backend = tiny.byte_level()
    backend.add_special_tokens([AddedToken("<|greedy|>", rstrip=True)])
    tokenizer = tiny.paged(backend)
    assert tokenizer.encode("<|greedy|>" + " " * 10_000, add_special_tokens=False) == [
        tokenizer.token_id("<|greedy|>")
    ]
    assert tokenizer.fewest_tokens("<|greedy|>" + " " * 10_000) == 0


@pytest.mark.parametrize(("pre", "pattern"), [("gpt-2", None), ("llama-bpe", tiny.LLAMA3_PATTERN)])
def test_gguf_byte_level_equals_the_tokenizer_it_was_made_from(
    pre: str, pattern: str | None, tmp_path: Path
) -> None:
    backend = tiny.byte_level(pattern)
    keys = tiny.byte_level_keys(backend)
    tokenizer = Tokenizer.load(
        tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre=pre, add_bos_token=False, **keys)
    )
    for text in tiny.TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), False) == backend.decode(
            backend.encode(text).ids, False
        )
    tool = tokenizer.token_id("<tool>")
    assert tokenizer.encode("a<tool>b")[1] == tool
    assert tool not in tokenizer.special_ids
    assert tokenizer.token_id("<|end|>") in tokenizer.special_ids


def test_gguf_qwen2_cuts_digits_and_normalizes(tmp_path: Path) -> None:
    keys = tiny.byte_level_keys(tiny.byte_level())
    tokenizer = Tokenizer.load(tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre="qwen2", **keys))
    assert [tokenizer.token(i) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(
    ("pre", "flags", "bos", "eos"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_gguf_bos_and_eos(pre: str, flags: dict[str, bool], bos: bool, eos: bool, tmp_path: Path) -> None:
    keys = tiny.byte_level_keys(tiny.byte_level())
    tokenizer = Tokenizer.load(tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre=pre, **flags, **keys))
    text = tokenizer.encode("the cat", add_special_tokens=False)
    start, end = [tokenizer.token_id("<s>")] * bos, [tokenizer.token_id("</s>")] * eos
    assert tokenizer.encode("the cat") == [*start, *text, *end]


def test_gguf_sequence_ends(tmp_path: Path) -> None:
    keys = tiny.byte_level_keys(tiny.byte_level())
    end = keys["tokens"].index("<|end|>")
    tokenizer = Tokenizer.load(
        tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre="gpt-2", eot_token_id=end, **keys)
    )
    assert tokenizer.eos_token_ids == tuple(sorted([keys["eos_token_id"], end]))


def sentencepiece_gguf(path: Path, **keys: Any) -> ModelSource:
    tokens, scores, types = tiny.sentencepiece_vocabulary()
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return tiny.save_gguf(path, "llama", tokens=tokens, scores=scores, token_type=types, **ids, **keys)


def test_gguf_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    architecture = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
    }
    source = sentencepiece_gguf(tmp_path / "m.gguf", **architecture)
    tokenizer = Tokenizer.load(source)
    reference = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    # Transformers adds no space behind a special token, nor before a space that is there already.
    texts = [text for text in tiny.TEXTS if text[:1] not in ("", " ", "▁") and "<" not in text]
    assert len(texts) == 4
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gguf_sentencepiece_joins_by_score(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "m.gguf"))
    tokens, scores, _ = tiny.sentencepiece_vocabulary()
    rank = dict(zip(tokens, scores, strict=True))

    def joined(word: str) -> list[str]:
        """Sentencepiece's rule, word by word: join the neighbours whose union has the best score."""
        parts = list(word)
        while True:
            pairs = [(rank[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
            if not pairs:
                return parts
            i = -max(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    for word in {word for line in tiny.CORPUS[:3] for word in line.split() if set(word) <= rank.keys()}:
        ids = tokenizer.encode(word, add_special_tokens=False)
        assert [tokenizer.backend.id_to_token(token_id) for token_id in ids] == joined("▁" + word)


def test_gguf_sentencepiece_spaces_and_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "m.gguf"))
    # BOS is added unless the file says otherwise, and every stretch of text gets its space.
    assert tokenizer.encode("the</s>the") == [1, tokenizer.token_id("▁the"), 2, tokenizer.token_id("▁the")]
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("🙂")[2:]] == [
        b"\xf0",
        b"\x9f",
        b"\x99",
        b"\x82",
    ]
    plain = Tokenizer.load(
        sentencepiece_gguf(tmp_path / "n.gguf", add_space_prefix=False, add_bos_token=False)
    )
    assert plain.decode(plain.encode(" the cat")) == " the cat"
    assert plain.decode(plain.encode("the cat")) == "the cat"


def test_gguf_chat_templates(tmp_path: Path) -> None:
    keys = tiny.byte_level_keys(tiny.byte_level()) | {
        "tokenizer.chat_template": tiny.CHATML,
        "tokenizer.chat_template.tool_use": "{{ tools | length }} tools",
    }
    tokenizer = Tokenizer.load(tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre="gpt-2", **keys))
    assert (
        tokenizer.chat_text([{"role": "user", "content": "Hi"}])
        == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    )
    assert tokenizer.chat_text([{"role": "user", "content": "Hi"}], tools=[{"name": "f"}]) == "1 tools"


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("gpt2", {"merges": None}, r"has no tokenizer\.ggml\.merges.*convert the model again"),
        ("gpt2", {"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        (
            "gpt2",
            {"pre": "deepseek-coder"},
            r"pre-tokenizer 'deepseek-coder' .* allowed: default, gpt-2, llama-bpe",
        ),
        ("gpt2", {"merges": ["ab"]}, "not two tokens and a space"),
        ("gpt2", {"merges": ["zq qz"]}, r"tokenizer\.ggml\.merges do not fit the tokens"),
        ("gpt2", {"token_type": [1, 1]}, r"token_type has 2 entries for \d+ tokens"),
        ("gpt2", {"eos_token_id": 99999}, r"eos_token_id is 99999, but there are \d+ tokens"),
        ("bert", {}, r"tokenizer\.ggml\.model 'bert' is not supported; gpt2 and llama are"),
        ("llama", {"merges": None}, r"has no tokenizer\.ggml\.scores"),
    ],
)
def test_incomplete_gguf_files_are_refused(
    model: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys = {"pre": "gpt-2"} | tiny.byte_level_keys(tiny.byte_level()) | changes
    present = {key: value for key, value in keys.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tiny.save_gguf(tmp_path / "m.gguf", model, **present))


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = {
        "tokenizer.ggml.scores": [0.5, -1.25],
        "general.languages": ["en", "größer"],
        "general.file_type": 3,
        "some.flag": True,
        "some.numbers": [1, -2, 3],
    }
    tiny.save_gguf(path, "gpt2", **values)
    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert read_metadata(path) == expected
    assert expected.items() >= values.items()


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny.save_gguf(path, "gpt2", pre="gpt-2", **tiny.byte_level_keys(tiny.byte_level()))
    whole = path.read_bytes()
    for content, message in [
        (b"", "cannot mmap an empty file"),
        (b"PK" + whole[2:], "is no GGUF file"),
        (whole[:10], "cut short or damaged"),
        (whole[:4] + b"\x01" + whole[5:], "GGUF version 1; supported"),
        (whole[:1000], "cut short or damaged"),
        (whole[:-2], "cut short or damaged"),
        (whole[:16] + b"\xff" * 8 + whole[24:], "cut short or damaged"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            read_metadata(path)
