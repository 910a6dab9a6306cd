"""Prompt tokens per step, chosen so that batches are even and memory stays full; requests fed.

By Little's law, requests that each hold w block-steps (blocks, summed over the steps that they
are held) fill M blocks if M / w of them are admitted per step. So prefill is paced at

    M * (prefill tokens) / (block-steps)

of the average request, in tokens per step. At that rate running requests are of all ages. Admitted
in one burst, they would all grow and end together, and memory for all of their last tokens would
lie idle before and after.

If few requests run at a time, the rate is only a few tokens of a prompt per step, while its blocks
are held. So a prompt takes at most a sixteenth of its output's steps, and the next one begins when
the pace has caught up.

Filling memory at that rate takes as long as one output. For a job only a few times as large as
memory that is too long, so it is admitted faster, in waves: see `fill_share`.

Adding a request takes vLLM about 0.39 ms, in the process that steps. So an engine begins with a
few, and takes the others while it works, a few more than have finished: 32 take 12 ms, about a
step's time, in which the device is busy with the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub
from typing import Final, NamedTuple, Self

from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

# Accepted cost of even batches, in steps and in predicted time: requests of all ages leave room
# for outputs that turn out longer than estimated.
_MORE_STEPS: Final = 1.03
_MORE_SECONDS: Final = 1.01
_SHARES: Final = 64
_PREFILL_SHARE: Final = 1 / 16  # most steps of a prefill, as a share of its output's steps
_MOST_STEPS_SAVED: Final = 2.0  # longest carry-over of unused or excess prefill, in steps
_FIRST_FED: Final = 64
_MORE_FED: Final = 32
_LOOK_AHEAD: Final = 2  # requests held, as a multiple of the most that run: it never runs dry


def num_to_feed(num_in_flight: int, num_finished: int, max_num_seqs: int) -> int:
    """Requests to add before the next step.

    Args:
        num_in_flight: requests that the engine holds.
        num_finished: requests that the last step has finished; 0 before the first.
        max_num_seqs: most requests that it runs at a time.
    """
    num_wanted = max(_FIRST_FED - num_in_flight, num_finished + _MORE_FED)
    return min(num_wanted, _LOOK_AHEAD * max_num_seqs - num_in_flight)


class Waiting(NamedTuple):
    """Sums over waiting requests. Each member of a group counts for its part of the prefix."""

    num_requests: int = 0
    num_guessed: int = 0  # outputs whose length is a guess
    num_prefill_tokens: float = 0.0
    num_prompt_blocks: float = 0.0
    num_output_tokens: int = 0  # estimated

    @classmethod
    def of_request(cls, num_blocks: float, output: int, block_size: int, *, is_guess: bool) -> Self:
        """One request, with `num_blocks` full blocks of a prompt and estimated output tokens."""
        return cls(
            num_requests=1,
            num_guessed=int(is_guess),
            num_prefill_tokens=num_blocks * block_size,
            num_output_tokens=output,
            num_prompt_blocks=num_blocks + 0.5,  # the last one isn't full
        )

    def plus(self, other: Waiting, sign: int = 1) -> Waiting:
        """The sums with other requests, or without them with a `sign` of -1."""
        return Waiting._make(map(add if sign > 0 else sub, self, other))

    def average(
        self, scale: float, block_size: int, tokens_per_step: float = 1.0
    ) -> AverageRequest:
        """The average request, of one at least; outputs are `scale` times as long as estimated.

        A few long outputs would hold most of the block-steps, but only once as many run as in the
        long term: a job ends before that, and would wait for memory to fill.
        """
        output = scale * self.num_output_tokens / self.num_requests
        num_blocks = self.num_prompt_blocks / self.num_requests
        return AverageRequest(
            prefill_tokens=self.num_prefill_tokens / self.num_requests,
            output_tokens=output,
            output_steps=max(1.0, output / tokens_per_step),
            final_blocks=num_blocks + output / block_size,
            mean_blocks=num_blocks + output / (2 * block_size),
        )


@dataclass(frozen=True, slots=True)
class AverageRequest:
    """Averages over requests."""

    prefill_tokens: float
    output_tokens: float
    output_steps: float
    final_blocks: float
    """Blocks when the request ends."""
    mean_blocks: float
    """Mean blocks over its output's steps."""


def fill_share(
    request: AverageRequest,
    num_requests: int,
    num_blocks: int,
    most_tokens: int,
    cost: StepCost | None = None,
) -> float:
    """The best time to fill memory, as a share of an output's steps, above 0 and at most 1.

    If requests are admitted over a share t of the o steps that each runs, and the next ones when
    they end, M blocks hold

        n(t) = M / (final blocks - t * (final blocks - mean blocks))

    of them, so N requests are admitted in N / n waves. A wave is t * o steps with prefill and
    (1 - t) * o without; the last one is only as long as needed, and one more output follows it.
    Of all t with at most 3 % more steps than the fewest, this is the largest whose predicted time
    is at most 1 % above the shortest.

    Args:
        request: the average of all.
        num_requests: N.
        num_blocks: M.
        most_tokens: most tokens of a step.
        cost: of a step; without it, only steps count.
    """
    of = cost or StepCost()
    num_tokens = num_requests * (request.prefill_tokens + request.output_tokens)

    def steps_and_seconds(share: float) -> tuple[float, float]:
        num_running = max(1.0, num_blocks / _held_blocks(request, share))
        prefill_tokens = num_running * request.prefill_tokens
        steps = request.output_steps
        fill = max(share * steps, prefill_tokens / most_tokens)
        waves, rest = divmod(num_requests / num_running, 1)
        filling, waiting = (waves + rest) * fill, waves * max(steps - fill, 0.0)
        later = waiting * num_running + steps * num_running / 2
        seconds = (
            filling * of.seconds(max(num_tokens - later, 0.0) / filling)
            + waiting * of.seconds(num_running)
            + steps * of.seconds(num_running / 2)
        )
        return filling + waiting + steps, seconds

    by_share = {idx / _SHARES: steps_and_seconds(idx / _SHARES) for idx in range(1, _SHARES + 1)}
    most_steps = _MORE_STEPS * min(steps for steps, _ in by_share.values())
    short = {share: seconds for share, (steps, seconds) in by_share.items() if steps <= most_steps}
    most_seconds = (_MORE_SECONDS if cost else _MORE_STEPS) * min(short.values())
    return max(share for share, seconds in short.items() if seconds <= most_seconds)


def _held_blocks(request: AverageRequest, share: float) -> float:
    """Mean blocks per request when the first one is about to end."""
    return request.final_blocks - share * (request.final_blocks - request.mean_blocks)


class Pace:
    """Decides how many prompt tokens a step may have; for its arguments, see `fill_share`."""

    def __init__(self, num_blocks: int, most_tokens: int, cost: StepCost | None = None) -> None:
        self._num_blocks, self._most_tokens, self._cost = num_blocks, most_tokens, cost
        self._allowance = 0.0
        self.fill_share = 1.0

    def tokens(
        self,
        request: AverageRequest,
        num_requests: int,
        num_used_blocks: int,
        *,
        is_running: bool,
        is_prefilling: bool,
    ) -> tuple[int, int]:
        """Prompt tokens that the next step may have, and each later one.

        Args:
            request: the average of all that wait.
            num_requests: requests that wait or are still to come.
            num_used_blocks: blocks that running requests hold.
            is_running: whether requests run; otherwise memory is filled afresh.
            is_prefilling: whether a prompt is partly prefilled.
        """
        if num_requests * request.final_blocks + num_used_blocks <= self._num_blocks:
            return self._most_tokens, self._most_tokens  # all of them fit
        if not is_running:
            self.fill_share = fill_share(
                request, num_requests, self._num_blocks, self._most_tokens, self._cost
            )
        now = self.next_step(request, is_prefilling=is_prefilling)
        return int(now), int(max(self.rate(request), _least(request)))

    def rate(self, request: AverageRequest) -> float:
        """Prompt tokens per step at which requests like this one fill memory."""
        num_running = max(1.0, self._num_blocks / _held_blocks(request, self.fill_share))
        return num_running * request.prefill_tokens / (self.fill_share * request.output_steps)

    def next_step(self, request: AverageRequest, *, is_prefilling: bool = False) -> float:
        """Prompt tokens that the next step may have; see `tokens`."""
        rate = self.rate(request)
        most = max(_MOST_STEPS_SAVED * rate, request.prefill_tokens)
        self._allowance = min(max(self._allowance, -most) + rate, most)
        if self._allowance > 0 or is_prefilling:
            return max(self._allowance, _least(request))
        return 0.0

    def used(self, num_tokens: int) -> None:
        """Note how many prompt tokens the step has used."""
        self._allowance -= num_tokens


def _least(request: AverageRequest) -> float:
    """Fewest prompt tokens of a step while a prompt is being prefilled."""
    part = request.prefill_tokens / (_PREFILL_SHARE * request.output_steps)
    return max(1.0, min(part, request.prefill_tokens))
