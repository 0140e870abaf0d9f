"""Several prompts of one request: each is a job of its own, with its own exchange; here they become one answer.

Every exchange has a task of its own as its owner. What it brings is handed on under the numbers of the whole answer:
choice `c` of prompt `p` is choice `p * n + c`. The first prompt that fails ends all others, at once, with its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from gateway.exchange import Exchange, ExchangeRoom
from gateway.progress import Completed, Outcome, Progress
from gateway.received import waiting_bytes
from schemas.errors import MeshError
from schemas.frames import Delta, Usage


class JointExchange(Progress):
    """See the module; `joined` makes one. `members` are the exchanges of the prompts, in order."""

    def __init__(self, members: Sequence[Exchange], room: ExchangeRoom, *, request_id: str) -> None:
        first = members[0]
        super().__init__(
            first.job,
            request_id=request_id,
            choice_count=len(members) * first.choice_count,
            streamed=first.streamed,
            settings=room.settings,
            clock=room.clock,
        )
        self._members = tuple(members)
        self._publishing = asyncio.Semaphore(room.settings.publications_at_once_max)
        self._unpublished = len(members)
        self._outcomes: dict[int, Completed] = {}
        self._defect: Exception | None = None

    @property
    def attempts(self) -> int:
        """See `Progress`."""
        return sum(member.attempts for member in self._members)

    @property
    def tokens(self) -> int:
        """See `Progress`."""
        return sum(member.tokens for member in self._members)

    async def next(self) -> list[Delta]:
        """See `Progress.next`."""
        while not (self._ready or self._announce or self.outcome is not None):
            await self._changes()
        return self._take()

    def fail(self, error: MeshError) -> None:
        """See `Progress.fail`."""
        if self.outcome is not None:
            return
        self._conclude(error)
        for member in self._members:
            member.fail(error)

    def sweep(self, now: float) -> None:
        """Leave word of what is due to the client. What is due of a prompt, its exchange knows."""
        if self.outcome is not None:
            self._cut_off(now)
        else:
            self._keep_alive(now)
            self._judge_reader()

    async def run(self) -> None:
        """Own all members until they have ended."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, member in enumerate(self._members):
                    group.create_task(self._own(member, number), name="prompt")
        except* Exception as defects:
            self._defect = defects.exceptions[0]
            self._wake()

    async def until_published(self) -> None:
        """Wait until every job is in the queue, or was claimed from it. The calling task becomes the owner. Raises the
        `MeshError` of the first one that is refused; by then the others are taken back."""
        self._owner = asyncio.current_task()
        while self._unpublished and self.outcome is None:
            await self._changes()
        if isinstance(self.outcome, MeshError):
            raise self.outcome

    async def _changes(self) -> None:
        """Wait for a change. Raises what went wrong in the task of a member, which is a defect of ours."""
        if self._defect is not None:
            raise self._defect
        await self.changed()

    async def _own(self, member: Exchange, number: int) -> None:
        await self._publish(member)
        while True:
            self._hand_on(await member.next(), member, number)
            member.told = True  # the sign of life is ours to give
            if member.outcome is not None:
                return

    async def _publish(self, member: Exchange) -> None:
        try:
            async with self._publishing:
                if member.outcome is None:
                    await member.begin()
        except MeshError as error:
            member.fail(error)
        self._unpublished -= 1
        self._wake()

    def _hand_on(self, frames: list[Delta], member: Exchange, number: int) -> None:
        """Take what came of a member, and its end."""
        if self.outcome is not None:
            return
        if self.started is None and member.started is not None:
            self._start(member.started)
        self._tell(frames, first_choice=number * member.choice_count)
        if isinstance(member.outcome, MeshError):
            self.fail(_of_prompt(member.outcome, number))
        elif member.outcome is not None:
            self._end_member(member.outcome, first_choice=number * member.choice_count)

    def _tell(self, frames: list[Delta], *, first_choice: int) -> None:
        for frame in frames:
            told = msgspec.structs.replace(frame, choice=first_choice + frame.choice) if first_choice else frame
            self._put(told, waiting_bytes(told))

    def _end_member(self, outcome: Completed, *, first_choice: int) -> None:
        """Say how its choices ended, as others may go on for long, and end with the last one."""
        ends = [
            Delta(handle=1, seq=0, text="", choice=choice, finish=reason)
            for choice, reason in enumerate(outcome.finish_reasons)
        ]
        self._tell(ends, first_choice=first_choice)
        self._outcomes[first_choice] = outcome
        if self.outcome is None and len(self._outcomes) == len(self._members):
            self._conclude(_sum_of([self._outcomes[choice] for choice in sorted(self._outcomes)]))


@asynccontextmanager
async def joined(
    members: Sequence[Exchange], room: ExchangeRoom, *, request_id: str, entered: Callable[[JointExchange], None]
) -> AsyncIterator[JointExchange]:
    """Publish the jobs of `members` and join what comes of them; whatever still runs for them on leaving is stopped.
    `entered` is told of it before.

    At most `publications_at_once_max` publications are under way at once. Raises `MeshError` when the queue refuses a
    job: then none of them is in it any more, or will be taken back as soon as its publication is acknowledged.
    """
    joint = JointExchange(members, room, request_id=request_id)
    entered(joint)
    running = asyncio.create_task(joint.run(), name="prompts")
    try:
        await joint.until_published()
        yield joint
    finally:
        joint.close()
        await asyncio.wait({running})  # all members have ended, so their tasks do


def _sum_of(outcomes: Sequence[Completed]) -> Outcome:
    return Completed(
        finish_reasons=tuple(reason for each in outcomes for reason in each.finish_reasons),
        usage=Usage(
            prompt_tokens=sum(each.usage.prompt_tokens for each in outcomes),
            completion_tokens=sum(each.usage.completion_tokens for each in outcomes),
            cached_tokens=sum(each.usage.cached_tokens for each in outcomes),
        ),
    )


def _of_prompt(error: MeshError, number: int) -> MeshError:
    """`error`, naming the prompt at fault, if it is a prompt that is."""
    if error.param != "prompt":
        return error
    return MeshError(error.code, error.message, param=f"prompt[{number}]", retry_after_s=error.retry_after_s)
