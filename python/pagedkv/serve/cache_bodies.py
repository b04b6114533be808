"""What the commands about the cache may say: pydantic models of their bodies, by the rules of `protocol`."""

from pagedkv.serve.errors import refuse
from pagedkv.serve.protocol import Body, Messages, Prompts, Salt, SessionId, TemplateFields, Ttl


class PromptBody(TemplateFields):
    """A prompt, given as /v1/completions takes it or as /v1/chat/completions does."""

    model: str | None = None
    prompt: Prompts | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    cache_salt: Salt | None = None

    def check(self) -> None:
        """Refuses two prompts, or none."""
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            refuse("prompt", f"Exactly one of prompt and messages is required, got {got}.")
        if self.prompt is not None and len(self.prompt) != 1:
            refuse("prompt", f"prompt must be a single one, got {len(self.prompt)}.")
        if self.messages is not None:
            self.check_template(self.messages)


class PinRequest(PromptBody):
    """Body of POST /v1/cache/pins."""

    ttl: Ttl | None = None


class LookupRequest(PromptBody):
    """Body of POST /v1/cache/lookup."""


class ForkRequest(Body):
    """Body of POST /v1/sessions/{id}/fork, which may be empty."""

    id: SessionId | None = None
    ttl: Ttl | None = None
    cache_salt: Salt | None = None
