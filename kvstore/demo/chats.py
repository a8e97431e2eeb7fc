"""Drives an engine over HTTP as a chat client would, and keeps what each turn answered."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from kvstore.core.errors import KVStoreError
from kvstore.demo.texts import Talk

REPLY_TOKENS = 16
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn as the engine reports it; counts are tokens."""

    token_ids: list[int]
    prompt_tokens: int
    served_tokens: dict[str, int]
    recomputed_tokens: int
    ttft_s: float
    plan: str

    def cached_tokens(self, block_tokens: int) -> int:
        """What the next turn can at best find cached: the full blocks of all tokens that have KV, that is all but the
        last one sampled."""
        return (self.prompt_tokens + len(self.token_ids) - 1) // block_tokens * block_tokens


def say(url: str, session_id: str, message: str, plan: str) -> Reply:
    """Send only the new message; the session knows the rest. Raises KVStoreError where the engine refuses."""
    body = {
        "messages": [{"role": "user", "content": message}],
        "session_id": session_id,
        "session_mode": "append",
        "max_tokens": REPLY_TOKENS,
        "ignore_eos": True,
        "plan": plan,
    }
    answer = _post(url, "/v1/chat/completions", body)
    told = answer["kvstore"]
    if told["session_id"] != session_id or told["forked"]:
        raise KVStoreError(f"session {session_id} was forked to {told['session_id']}")
    return Reply(
        told["token_ids"],
        told["prompt_tokens"],
        told["served_tokens"],
        told["recomputed_tokens"],
        told["ttft_s"],
        told["plan"],
    )


def say_all(url: str, talks: Sequence[Talk], messages: Sequence[str], plan: str, at_once: int) -> list[Reply]:
    """`say` for several sessions, `at_once` of them side by side; out[i] answers talks[i]."""
    with ThreadPoolExecutor(at_once) as threads:
        waiting = [
            threads.submit(say, url, talk.session_id, text, plan) for talk, text in zip(talks, messages, strict=True)
        ]
        return [reply.result() for reply in waiting]


def recompute(url: str, prompt: list[int]) -> tuple[float, int]:
    """Return TTFT and the first token of a prompt with everything recomputed, leaving no trace in any cache."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "plan": "recompute"}
    told = _post(url, "/v1/completions", body)["kvstore"]
    return told["ttft_s"], told["token_ids"][0]


def drop_hbm(url: str) -> None:
    """Empty the engine's HBM cache."""
    _post(url, "/v1/hbm/drop", {})


def _post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json=body, timeout=_DEADLINE_S)
    if answer.status_code != 200:
        raise KVStoreError(f"{path} answered {answer.status_code}: {answer.text[:500]}")
    return dict(answer.json())
