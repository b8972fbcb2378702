"""Runs one piece of work on the model: a prompt slice, or draft - verify - accept - commit.

Everything here speaks token ids and tensors. A fault of one request (its rows, its grammar, its stop
rules) ends that request; the others go on as if it had not been there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from soloist.drafting.proposal import Proposal
from soloist.engine.memory import Memory
from soloist.engine.request import Event, FinishReason, Request, TokenLogprobs
from soloist.engine.scheduler import PrefillSlice
from soloist.engine.speculation import SettledRows, Speculation
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import AcceptedPath, Features
from soloist.models.step import GRID, RequestRows, VerifyStep, prefill_step, verify_step
from soloist.ops.top import Heads
from soloist.planner import MAX_ROWS
from soloist.sampling.logprobs import prompt_logprobs, token_logprobs
from soloist.sampling.verify import Verdict, verify

Fault = Callable[[Request, Exception], None]


class Runner:
    """Owns the model and moves requests forward. `finish` and `fault` are the engine's; `computed` hears of every
    prompt slice before its last token is handed out."""

    def __init__(
        self,
        model: Qwen35,
        memory: Memory,
        speculation: Speculation,
        max_len: int,
        verify_rows: int,
        computed: Callable[[Request], None],
        finish: Callable[[Request, Event], None],
        fault: Fault,
    ) -> None:
        self.model, self.memory, self.speculation = model, memory, speculation
        self.max_len, self.verify_rows = max_len, verify_rows
        self._computed, self._finish, self._fault = computed, finish, fault

    # -- prompts ---------------------------------------------------------------------------------------------------

    def prefill(self, work: PrefillSlice) -> bool:
        """Compute a prompt slice; True when the prompt is complete and the first token was emitted."""
        request, start = work.request, work.request.settled
        tokens = request.prompt[start : start + work.tokens]
        step = prefill_step(tokens, start, request.slot, request.pages, request.sight)
        features = self.model.forward(step, self.memory.caches, self.speculation.taps)
        request.settled += len(tokens)
        if request.params.prompt_logprobs is not None:
            self._prompt_rows(request, start, features)
        if request.settled < len(request.prompt):
            self._absorb_prompt(request, start, features, request.prompt[start + 1 : request.settled + 1])
            self._computed(request)
            return False
        rows = self.model.logits(features.hidden[len(tokens) - 1 : len(tokens)])
        assert request.history is not None
        verdict = verify(rows, Proposal(), request.history, request.seed, request.mode)
        following = request.prompt[start + 1 :] + verdict.tokens
        self._absorb_prompt(request, start, features, following)
        self._computed(request)
        self._emit(request, verdict, rows)
        return True

    def _absorb_prompt(self, request: Request, start: int, features: Features, following: list[int]) -> None:
        taps = None if features.taps is None else features.taps[: len(following)]
        rows = SettledRows(request, start, features.hidden[: len(following)], taps, following)
        self.speculation.absorb([rows])

    def _prompt_rows(self, request: Request, start: int, features: Features) -> None:
        """Row i of the prompt predicts token i + 1; the first token has no prediction."""
        if start == 0:
            request.prompt_rows = [None]
        following = request.prompt[start + 1 : request.settled + 1]
        # Always GRID rows: a few would take the kernel of a step, with other bits, and logits of a whole slice are
        # hundreds of MiB, which a card has not planned for.
        for first in range(0, len(following), GRID):
            logits = self.model.logits(features.hidden[first : first + GRID])
            part = following[first : first + GRID]
            request.prompt_rows += prompt_logprobs(logits[: len(part)], part, request.params.prompt_logprobs or 0)

    # -- decode ----------------------------------------------------------------------------------------------------

    def decode(self, requests: Sequence[Request]) -> None:
        """One step of every request: draft, verify, accept, commit. Requests that do not fit into one go in halves."""
        if len(requests) > 1 and self._rows_each(requests) == 0:
            half = len(requests) // 2
            self.decode(requests[:half])
            self.decode(requests[half:])
            return
        proposals = self._draft(requests)
        step, features, logits = self._verify(requests, proposals)
        verdicts = self._accept(requests, proposals, step, logits, features.heads() if features.heads else None)
        self._commit(requests, step, features, verdicts)

    def _rows_each(self, requests: Sequence[Request]) -> int:
        return self.model.rows_each([r.settled for r in requests])

    def _draft(self, requests: Sequence[Request]) -> list[Proposal]:
        # All requests share the rows of the largest step; who gets how many depends on their number and lengths alone.
        each = min(MAX_ROWS // len(requests), self._rows_each(requests))
        most = min(self.verify_rows, max(1, each)) - 1
        limits = [max(0, min(most, r.remaining - 1, self.max_len - r.length)) for r in requests]
        proposals = self.speculation.propose(requests, limits)
        for i, request in enumerate(requests):
            # Pages for the anchor and the longest path; with a dry pool the step falls back to the anchor alone.
            if len(proposals[i]) and not self.memory.grow(request, request.length + len(proposals[i]) + 1):
                proposals[i] = Proposal()
        return proposals

    def _verify(
        self, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[VerifyStep, Features, torch.Tensor]:
        batch = [
            RequestRows(
                tokens=[r.token(r.settled), *p.tokens],
                parents=[-1, *(parent + 1 for parent in p.parents)],
                settled=r.settled,
                slot=r.slot,
                pages=r.pages,
                rope_offset=r.rope_offset,
            )
            for r, p in zip(requests, proposals, strict=True)
        ]
        step = verify_step(batch, self.model.config.conv_kernel)
        features = self.model.forward(step, self.memory.caches, self.speculation.taps)
        logits = features.logits
        return step, features, self.model.logits(features.hidden) if logits is None else logits

    def _accept(
        self,
        requests: Sequence[Request],
        proposals: Sequence[Proposal],
        step: VerifyStep,
        logits: torch.Tensor,
        heads: Heads | None,
    ) -> list[Verdict | None]:
        """Per request: the verdict after its stop rules, or None if the request failed here."""
        verdicts: list[Verdict | None] = []
        for request, proposal, rows in zip(requests, proposals, step.attention, strict=True):
            part = logits[rows.start : rows.stop]
            best = None if heads is None else heads.part(rows.start, rows.stop)
            try:
                assert request.history is not None
                verdict = verify(part, proposal, request.history, request.seed, request.mode, request.remaining, best)
                verdict = self._emit(request, verdict, part, proposal)
                self.speculation.observe(request, proposal, verdict)
                verdicts.append(verdict)
            except Exception as error:  # one request's fault never touches another
                self._fault(request, error)
                verdicts.append(None)
        return verdicts

    def _commit(
        self, requests: Sequence[Request], step: VerifyStep, features: Features, verdicts: Sequence[Verdict | None]
    ) -> None:
        paths: list[AcceptedPath] = []
        going: list[tuple[Request, Verdict]] = []
        for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            if verdict is None or request.slot < 0:
                continue
            rows = [step.attention[i].start + row for row in verdict.rows]
            paths.append(AcceptedPath(i, rows, request.pages, request.settled))
            going.append((request, verdict))
        assert features.record is not None
        features.record.settle(step, self.memory.caches, paths)
        if not going:
            return
        hidden, taps = features.kept([row for path in paths for row in path.rows])
        absorbed: list[SettledRows] = []
        at = 0
        for request, verdict in going:
            mine = slice(at, at + len(verdict.rows))
            at = mine.stop
            tapped = None if taps is None else taps[mine]
            absorbed.append(SettledRows(request, request.settled, hidden[mine], tapped, verdict.tokens))
            request.settled += len(verdict.rows)
        self.speculation.absorb(absorbed)

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _emit(
        self, request: Request, verdict: Verdict, rows: torch.Tensor, proposal: Proposal | None = None
    ) -> Verdict:
        """Hand out the tokens of a verdict one by one until a stop rule fires; returns what was kept."""
        reason: FinishReason | None = None
        stop: str | int | None = None
        kept = 0
        assert request.history is not None
        for token in verdict.tokens:
            request.history.advance(token)
            request.output.append(token)
            kept += 1
            matched = request.halt.push(token) if request.halt is not None else None
            if token in request.params.stop_ids:
                reason, stop = "stop", None if token in request.eos_ids else token
            elif matched is not None:
                reason, stop = "stop", matched
            elif request.remaining == 0 or request.length >= self.max_len:
                reason = "length"
            if reason is not None:
                break
        verdict = verdict.cut(kept)
        self._clock(request, kept)
        if proposal is not None:  # before the event: the last one hands the statistics out
            self._count(request, proposal, verdict)
        wanted = request.params.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = tuple(
                token_logprobs(rows, row, token, wanted)
                for row, token in zip(verdict.rows, verdict.tokens, strict=True)
            )
        event = Event(
            tokens=tuple(verdict.tokens),
            logprobs=logprobs,
            sources=tuple(verdict.sources),
            prompt_logprobs=self._take_prompt_rows(request),
            finish_reason=reason,
            stop_reason=stop,
            stats=request.stats if reason else None,
        )
        if reason is not None:
            self._finish(request, event)
        else:
            request.on_event(event)
        return verdict

    @staticmethod
    def _take_prompt_rows(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        if not request.prompt_rows:
            return None
        rows, request.prompt_rows = tuple(request.prompt_rows), []
        return rows

    @staticmethod
    def _clock(request: Request, tokens: int) -> None:
        stats, now = request.stats, time.perf_counter()
        if stats.first_token:
            stats.worst_gap = max(stats.worst_gap, now - stats.last_token)
        else:
            stats.first_token = now
        stats.last_token = now
        stats.output_tokens += tokens
        stats.steps += 1

    @staticmethod
    def _count(request: Request, proposal: Proposal, verdict: Verdict) -> None:
        stats = request.stats
        if not len(proposal):
            return
        stats.draft_steps += 1
        stats.drafted += len(proposal)
        stats.accepted += verdict.accepted
        missing = verdict.accepted + 1 - len(stats.accepted_histogram)
        stats.accepted_histogram += [0] * max(0, missing)
        stats.accepted_histogram[verdict.accepted] += 1
        for source in verdict.sources:
            if source != "target":
                stats.accepted_by_source[source] = stats.accepted_by_source.get(source, 0) + 1
