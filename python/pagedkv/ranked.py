"""Answers that are known only when all of them are: those of a beam search, and the best of many.

Nothing of them shows before the end. Both are states of a request as `streams` has them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedkv.beam_search import BeamSearchOutput, BeamSearchSequence
from pagedkv.events import STOP, BeamAnswer, Event, StepReport
from pagedkv.outputs import FinishReason, RequestOutput
from pagedkv.streams import RequestState, SampleState

if TYPE_CHECKING:
    from pagedkv.request import Request
    from pagedkv.text.tokenizer import Tokenizer


def state_of(request: "Request", request_id: str, core_id: int, tokenizer: "Tokenizer") -> RequestState:
    """The state of a request that was just submitted, by what it asks for."""
    kind = RequestState
    if request.beam is not None:
        kind = BeamState
    elif request.params.num_samples > request.params.n:
        kind = BestOfState
    return kind(request, request_id, core_id, tokenizer)


class BestOfState(RequestState):
    """The n likeliest of best_of answers, by the mean of their tokens' log-probabilities."""

    grows = False
    _best: list[SampleState] | None = None

    @property
    def _needs_logprobs(self) -> bool:
        return True

    @property
    def given(self) -> list[SampleState]:
        """The best n, in order; of equal ones the first. None before the end."""
        if self._best is None and self.finished and self.error is None:
            self._best = self._rank()
        return self._best or []

    def _rank(self) -> list[SampleState]:
        params = self.request.params
        best = sorted(self.samples, key=_mean_logprob, reverse=True)[: params.n]
        for place, sample in enumerate(best):
            sample.index = place
            if params.logprobs is None:
                # They were only needed here.
                sample.logprobs = sample.text_offsets = None
        return best


def _mean_logprob(sample: SampleState) -> float:
    return sample.cumulative_logprob / max(len(sample.token_ids), 1)


class BeamState(RequestState):
    """The answers of a beam search."""

    grows = False
    _answers: Sequence[BeamAnswer] = ()

    @property
    def given(self) -> list[SampleState]:
        """The answers, the best first. None before the end."""
        return self.samples if self.finished else []

    def add_token(self, report: StepReport, event: Event) -> int | None:
        """Takes note of the time; the rows of a search are no answers yet."""
        self._note_token(report, event[5])
        return None

    def add_answers(self, answers: list[BeamAnswer]) -> None:
        """Takes the answers of the search, which is over."""
        if self.finished:
            return
        self._answers = answers
        params = self.request.params
        for sample, answer in zip(self.samples, answers, strict=True):
            sample.token_ids += answer.token_ids
            sample.cumulative_logprob = answer.cum_logprob
            stopped = answer.reason == STOP
            shown = answer.token_ids
            if stopped and not params.include_stop_str_in_output:
                shown = shown[:-1]
            for token_id in shown:
                sample.add_text(token_id)
            sample.finish("stop" if stopped else "length")

    def output(self) -> RequestOutput:
        """As of any request; the sums of the log-probabilities are known without having been asked for."""
        output = super().output()
        for answer, sample in zip(output.outputs, self.given, strict=True):
            answer.cumulative_logprob = sample.cumulative_logprob
        return output

    def beam_output(self) -> BeamSearchOutput:
        """The answers in the form of a beam search. Those of a search that was aborted are missing."""
        prompt = self.request.prompt_token_ids
        sequences = []
        for answer in self._answers:
            tokens = prompt + answer.token_ids
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
            reason: FinishReason = "stop" if answer.reason == STOP else "length"
            sequences.append(BeamSearchSequence(tokens, text, answer.cum_logprob, answer.score, reason))
        return BeamSearchOutput(sequences, prompt, self.num_cached_tokens)
