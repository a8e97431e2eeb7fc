"""What the server answers: OpenAI's objects, with our own account of the request under "kvstore"."""

import time
from typing import Any

import msgspec

from engine.body import Call
from engine.request import FinishReason, Request
from engine.turn import Refused, Saved
from kvstore.core.outcome import TierKind


def account(request: Request, saved: Saved | None, asked_id: str) -> dict[str, Any]:
    """Return the "kvstore" object: the session, and where the prompt's KV came from."""
    served = request.result
    assert served is not None, "a request that ended well has its first token"
    return {
        "session_id": (saved.session_id if saved is not None else asked_id) or None,
        "forked": saved is not None and saved.forked,
        "revision": 0 if saved is None else saved.revision,
        "session_saved": saved is not None and saved.in_kvstore,
        "prompt_tokens": served.prompt_tokens,
        "served_tokens": {tier.label: served.tokens.get(tier, 0) for tier in TierKind},
        "recomputed_tokens": served.recomputed,
        "recomputed_though_cached_tokens": served.recomputed_though_cached,
        "miss": served.miss,
        "plan": served.plan,
        "ttft_s": served.ttft_s,
        "saved_prefill_s": served.saved_prefill_s,
        "token_ids": request.output,
    }


def usage(request: Request) -> dict[str, Any]:
    served = request.result
    prompt, reply = len(request.prompt), len(request.output)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": 0 if served is None else prompt - served.recomputed},
    }


class ReplyForm:
    """Writes the objects of one reply."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        kind = "chat.completion" if call.is_chat else "text_completion"
        if call.streams and call.is_chat:
            kind += ".chunk"
        self._head = {"id": call.ask.id, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, text: str, finish: FinishReason, request: Request, kvstore: dict[str, Any]) -> bytes:
        """Return the answer to a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self._call.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": usage(request), "kvstore": kvstore})

    def opening(self) -> bytes:
        """Return the first event of a stream; nothing for completions."""
        if not self._call.is_chat:
            return b""
        return self._event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def piece(self, text: str) -> bytes:
        return self._event([self._choice(text, None)])

    def closing(self, finish: FinishReason, request: Request, kvstore: dict[str, Any]) -> bytes:
        """Return the last events: why it ended and our account, the usage if asked for, and the end mark."""
        events = self._event([self._choice("", finish)], kvstore=kvstore)
        if self._call.include_usage:
            events += self._event([], usage=usage(request))
        return events + b"data: [DONE]\n\n"

    def _choice(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        if not self._call.is_chat:
            return {"index": 0, "text": text, "finish_reason": finish}
        return {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "choices": choices, **more})


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(error: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "code": error.code}}
