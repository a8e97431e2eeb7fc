"""The bodies of requests, OpenAI's form with our own fields, checked and turned into an `Ask`.

What would change the answer and is not supported is refused by name, never ignored. Covers: form and ranges. Does not
cover: what depends on the model (context, vocabulary), see `engine/consult.py`.
"""

import difflib
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from engine.chat import Said
from engine.request import PlanMode, Sampling
from engine.turn import Ask, Keep, Refused, SessionMode

_Form = TypeVar("_Form", bound="_Common")
_Positive = Annotated[int, Meta(ge=1)]
_SessionId = Annotated[str, Meta(min_length=1, max_length=200)]
_Role = Annotated[str, Meta(pattern="^(system|developer|user|assistant|tool)$")]

# Fields of OpenAI's that change the answer: accepted only with a value that asks for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
# Fields of OpenAI's that do not, and the one in which vLLM is told of sessions: clients of both send it to either.
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
_IGNORED |= {"kv_transfer_params"}

_MAX_SHOWN_CHARS = 80


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: _Role
    content: str | list[_Part]


# What msgspec does not say of a field with a value that it refuses.
_CHOICES: Final = {
    "plan": "'auto', 'fetch', 'recompute', or [start, end] in blocks of the prompt",
    "session_mode": "'append' or 'history'",
}


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    max_tokens: _Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    plan: PlanMode = "auto"
    ignore_eos: bool = False
    tenant: Annotated[str, Meta(max_length=200)] | None = None
    expect_followup: bool = False
    end: bool = False
    priority: Annotated[int, Meta(ge=-2, le=2)] = 0
    ttl: Annotated[float, Meta(ge=0, le=31_622_400)] = 0.0
    pin: bool | None = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: _Positive | None = None
    session_id: _SessionId | None = None
    session_mode: SessionMode | None = None
    resume_only: bool = False
    save_session: bool = True


class _Completion(_Common, kw_only=True):
    prompt: str | list[int]


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request: what to ask the engine, and how to answer."""

    ask: Ask
    is_chat: bool
    streams: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `may_choose_tenant`: nobody is authenticated, so the body may name the tenant."""

    tenant: str
    may_choose_tenant: bool


def parse_chat(body: bytes, caller: Caller, model: str, arrival_s: float) -> Call:
    """Raises Refused (400) naming the field and what is wrong with it."""
    parsed = _parse(body, _Chat)
    if parsed.max_tokens and parsed.max_completion_tokens and parsed.max_tokens != parsed.max_completion_tokens:
        raise _bad("max_tokens and max_completion_tokens differ")
    session_id = parsed.session_id or ""
    if session_id and not session_id.isprintable():
        raise _bad("session_id holds characters that cannot be printed")
    if not session_id and (parsed.session_mode or parsed.resume_only):
        raise _bad("session_mode and resume_only need a session_id")
    messages = [Said(_role(message.role), _text(message.content)) for message in parsed.messages]
    if messages[-1].role == "assistant":
        raise _bad("the last message must not be the assistant's")
    ask = Ask(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        tenant=_tenant(parsed, caller),
        arrival_s=arrival_s,
        messages=messages,
        session_id=session_id,
        session_mode=parsed.session_mode,
        resume_only=parsed.resume_only,
        save_session=parsed.save_session,
        plan=parsed.plan,
        max_tokens=parsed.max_tokens or parsed.max_completion_tokens,
        sampling=_sampling(parsed),
        ignore_eos=parsed.ignore_eos,
        keep=_keep(parsed),
    )
    return _call(parsed, ask, model, is_chat=True)


def parse_completion(body: bytes, caller: Caller, model: str, arrival_s: float) -> Call:
    """Raises Refused (400) naming the field and what is wrong with it."""
    parsed = _parse(body, _Completion)
    ask = Ask(
        id=f"cmpl-{secrets.token_hex(12)}",
        tenant=_tenant(parsed, caller),
        arrival_s=arrival_s,
        prompt=parsed.prompt,
        plan=parsed.plan,
        max_tokens=parsed.max_tokens,
        sampling=_sampling(parsed),
        ignore_eos=parsed.ignore_eos,
        keep=_keep(parsed),
    )
    return _call(parsed, ask, model, is_chat=False)


def _parse(body: bytes, form: type[_Form]) -> _Form:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the body is no JSON object: {error}") from None
    known = form.__struct_fields__
    for name in list(fields):
        if name in _UNSUPPORTED:
            if fields[name] is not None and not any(_same(fields[name], value) for value in _UNSUPPORTED[name]):
                raise _bad(f"{name} is not supported")
            del fields[name]
        elif name in _IGNORED:
            del fields[name]
        elif name not in known:
            # Comparing takes seconds for a name of some megabytes.
            name = name[:_MAX_SHOWN_CHARS]
            nearest = difflib.get_close_matches(name, known, 1)
            raise _bad(f"unknown field {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
    try:
        return msgspec.convert(fields, form)
    except msgspec.ValidationError as error:
        text = str(error)
        raise _bad(text + next((f": {what}" for name, what in _CHOICES.items() if f"$.{name}`" in text), "")) from None


def _same(given: Any, neutral: Any) -> bool:
    # 0 and False are not told apart: both ask for nothing.
    return bool(given == neutral)


def _text(content: str | list[_Part]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise _bad(f"content of type {part.type!r} is not supported, only text")
    return "".join(part.text for part in content)


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _tenant(parsed: _Common, caller: Caller) -> str:
    if parsed.tenant is None or parsed.tenant == caller.tenant:
        return caller.tenant
    if not caller.may_choose_tenant:
        raise _bad("the tenant is that of the API key and cannot be chosen")
    if not parsed.tenant.isprintable():
        raise _bad("tenant holds characters that cannot be printed")
    return parsed.tenant


def _keep(parsed: _Common) -> Keep:
    if parsed.expect_followup and parsed.end:
        raise _bad("expect_followup and end contradict each other")
    return Keep(parsed.expect_followup, parsed.end, parsed.priority, parsed.ttl, parsed.pin)


def _sampling(parsed: _Common) -> Sampling:
    temperature = parsed.temperature or 0.0
    # A negative seed is as good as any; the generator wants none.
    seed = secrets.randbits(63) if parsed.seed is None else parsed.seed % (1 << 63)
    return Sampling(temperature, 1.0 if parsed.top_p is None else parsed.top_p, seed)


def _call(parsed: _Common, ask: Ask, model: str, *, is_chat: bool) -> Call:
    if parsed.model is not None and parsed.model != model:
        raise Refused(
            404, "model_not_found", f"model {parsed.model[:_MAX_SHOWN_CHARS]!r} is not served here, only {model!r}"
        )
    if isinstance(parsed.plan, tuple) and not 0 <= parsed.plan[0] <= parsed.plan[1]:
        raise _bad("plan is [start, end] in blocks of the prompt, 0 <= start <= end")
    options = parsed.stream_options
    return Call(ask, is_chat, bool(parsed.stream), options is not None and options.include_usage)


def _bad(message: str) -> Refused:
    return Refused(400, "invalid_request", message)
