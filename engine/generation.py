"""One request between the HTTP server's event loop and the engine's threads.

A client that goes away cancels its request. Covers: waiting, streaming, cancelling. Does not cover: HTTP routes, the
form of bodies and replies.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from engine.body import Call
from engine.chat import TextStream
from engine.metrics import Metrics
from engine.reply import ReplyForm, account, error_body, event
from engine.request import FinishReason, Progress
from engine.service import Engine
from engine.turn import Refused, Saved

_Result = TypeVar("_Result")
# A session that is not saved by then is reported as not saved; it is saved all the same, a little later.
_SAVE_DEADLINE_S = 3.0


class Slots:
    """How many requests may be under way at once. Used on the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def take(self) -> "Slot":
        """Raises Refused (429) where all are taken."""
        if self.taken >= self._most:
            raise Refused(429, "busy", f"{self._most} requests are under way; try again a little later")
        self.taken += 1
        return Slot(self)


class Slot:
    """One request's place, until `release`, which may be called again."""

    def __init__(self, slots: Slots) -> None:
        self._slots: Slots | None = slots

    def release(self) -> None:
        if self._slots is not None:
            self._slots.taken -= 1
            self._slots = None


class Generation:
    """Submits a call and follows it to its end. Lives on the event loop."""

    def __init__(self, engine: Engine, call: Call) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Progress] = asyncio.Queue()
        self.turn, self._opened = engine.open(call.ask, self._listen)
        self._text = TextStream(engine.tokenizer)
        self.finish: FinishReason | None = None
        # Where it has no finish of its own.
        self.ended_as = "cancelled"

    @property
    def text(self) -> str:
        return self._text.text

    async def opened(self) -> None:
        """Return when the step loop has the request. Raises Refused where it cannot be served."""
        try:
            await _shielded(self._opened)
        except Refused:
            self.ended_as = "refused"
            raise

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the reply's text as it comes, until its end. Raises Refused where the engine fails."""
        while self.finish is None:
            progress = await self._events.get()
            if progress.token_id is not None and (piece := self._text.add(progress.token_id)):
                yield piece
            self.finish = progress.finish
            if progress.finish == "error":
                raise Refused(500, "engine_error", progress.error)
            if progress.finish == "cancelled":
                raise Refused(503, "cancelled", "the request was cancelled")
        if rest := self._text.finish():
            yield rest

    async def saved(self) -> Saved | None:
        """Save the session; None where there is nothing to save, or it takes too long or fails."""
        assert self.turn.request is not None
        future = self._engine.close(self.turn, list(self.turn.request.output), self.text)
        try:
            return await asyncio.wait_for(_shielded(future), _SAVE_DEADLINE_S)
        except (TimeoutError, Refused):
            return None

    def cancel(self) -> None:
        """The client is gone, or the server ends. Nothing to do where the request has ended by itself."""
        if self.finish is None:
            self._engine.cancel(self.turn)

    def _listen(self, progress: Progress) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, progress)
        except RuntimeError:  # the loop is closed: the server has ended
            return


class GenerationResponse:
    """An ASGI response that runs a call and answers whole or as a stream."""

    def __init__(self, engine: Engine, call: Call, slots: Slots, metrics: Metrics) -> None:
        self._engine = engine
        self._call = call
        self._slots = slots
        self._metrics = metrics
        self._form = ReplyForm(call, engine.model_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refused before anything was sent; a fault after that becomes the stream's last event."""
        slot = self._slots.take()
        generation = Generation(self._engine, self._call)
        work = self._stream if self._call.streams else self._whole
        answer = asyncio.ensure_future(work(generation, slot, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            slot.release()
            generation.cancel()
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
            self._metrics.ended(generation.turn.request, generation.finish or generation.ended_as)

    async def _whole(self, generation: Generation, slot: Slot, send: Send) -> None:
        await generation.opened()
        async for _ in generation.pieces():
            pass
        request = generation.turn.request
        assert request is not None and generation.finish is not None
        saved = await generation.saved()
        body = self._form.whole(
            generation.text, generation.finish, request, account(request, saved, self._call.ask.session_id)
        )
        # Before the client can ask again.
        slot.release()
        await send(_start("application/json"))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, generation: Generation, slot: Slot, send: Send) -> None:
        await generation.opened()
        await send(_start("text/event-stream"))
        await _send_more(send, self._form.opening())
        try:
            async for piece in generation.pieces():
                await _send_more(send, self._form.piece(piece))
        except Refused as error:
            await _send_more(send, event(error_body(error)))
        else:
            request = generation.turn.request
            assert request is not None and generation.finish is not None
            saved = await generation.saved()
            slot.release()
            told = account(request, saved, self._call.ask.session_id)
            await _send_more(send, self._form.closing(generation.finish, request, told))
        await send({"type": "http.response.body", "body": b""})


async def _shielded(future: "Future[_Result]") -> _Result:
    return await asyncio.shield(asyncio.wrap_future(future))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(content_type: str) -> Message:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_more(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
