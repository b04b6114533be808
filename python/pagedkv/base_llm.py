"""What `LLM` and `AsyncLLM` share: how they come from their options, and what they say of themselves."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self, Unpack

from pagedkv import explanation
from pagedkv._core import Core
from pagedkv.config import EngineConfig, EngineOptions, check_names
from pagedkv.engine import Engine
from pagedkv.explanation import Explanation
from pagedkv.loading import load
from pagedkv.tenants import OTHERS

if TYPE_CHECKING:
    from pagedkv.models import ModelConfig
    from pagedkv.text.tokenizer import Tokenizer


class BaseLLM(ABC):
    """A loaded model with its front; the two classes differ in who steps the engine.

    It works in the process that loaded it: a child made by `fork` has none of the threads that compute, so
    requests raise EngineDead there. Processes that are to use a model have to load it themselves.

    The arguments are the fields of `EngineConfig`, which says what they mean and allow.
    """

    def __init__(self, model: str | None = None, **options: Unpack[EngineOptions]) -> None:
        """Loads the model; `AsyncLLM` also starts the engine's thread, which its `shutdown` ends.

        Raises:
            TypeError: there is no such option.
            ValueError: an option, or a combination of options and model, is not allowed.
            ModelError: the model cannot be found, read or run.
            BackendUnavailable: the device cannot be used.
        """
        check_names(type(self).__name__, options)
        self._load(EngineConfig(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from an `EngineConfig`."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: EngineConfig) -> None:
        engine, self._front = load(config)
        self._start(engine)

    @abstractmethod
    def _start(self, engine: Engine) -> None:
        """Takes over the engine."""

    def _explain(self, core: Core, core_id: int, salt: bytes) -> Explanation | None:
        found = core.explain(core_id, salt)
        return None if found is None else explanation.from_core(found, self.tokenizer)

    def _tenant_stats(self, core: Core) -> dict[str, dict[str, int]]:
        names = [OTHERS, *(tenant.name for tenant in self.config.named_tenants)]
        return dict(zip(names, core.tenants(), strict=True))

    @property
    def config(self) -> EngineConfig:
        """The options, as they were given."""
        return self._front.config

    @property
    def model_name(self) -> str:
        """What users call the model: its directory's name, its hub id, its file's name without the suffix."""
        return self._front.tokenizer.name

    @property
    def model_config(self) -> "ModelConfig":
        """The shape of the model."""
        return self._front.model_config

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        return self._front.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._front.limits.max_model_len
