"""From messages to token ids and back: what each message of a chat contributes to the sequence.

A session's tokens are the concatenation of its messages' ids, and a remembered message keeps its ids for good, so a
later turn continues the very tokens whose KV is stored; rendering and tokenising the whole history again would not
always give the same. To that end each message is rendered by itself, as what the model's template adds behind a
stand-in conversation:

    … <|im_start|>assistant\\n | reply | <|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
                                        └─ the user message's ids, with the prompt for the next reply ─┘

A message that a reply follows carries the prompt for that reply; a reply is its own tokens and nothing else. Leading
system messages are rendered with the message behind them, which some templates merge them into.

Only the template makes markers: text of a message that reads like one (`<|im_end|>`) becomes tokens that read the same
but mark nothing, so that nobody can put words in another role's mouth.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from kvstore.wire import ChatMessage

ASSISTANT = "assistant"
# Stands for a message whose text does not matter; must not be changed by trimming or escaping.
_STAND_IN = "kvstoreStandIn"


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    chat_template: Any

    @property
    def added_tokens_decoder(self) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class Said:
    """One message as a client sends it."""

    role: str
    content: str


class BadChat(Exception):
    """These messages cannot be rendered; the text is for the client, `code` for programs."""

    code = "bad_messages"


class TooLong(BadChat):
    """They were not even rendered to their end: they have too many tokens."""

    code = "context_length_exceeded"


class Chat:
    """Renders and tokenises messages for one model, up to `max_tokens`. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._eos = {token: str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in eos_token_ids}
        self._markers = _markers(tokenizer)
        self._numbers = {marker: number for number, marker in enumerate(self._markers)}
        self._marker = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        # Stands for a marker in a message while the template renders it: digits, which no template rewrites, and
        # which nobody can guess.
        self._nonce = f"{secrets.randbits(64):020d}"
        self._quoted = re.compile(self._nonce + r"(\d{6})")

    def extend(self, before: Sequence[ChatMessage], new: Sequence[Said]) -> list[ChatMessage]:
        """Return `new` with the ids that each adds behind `before`; the last one is to be answered.

        Raises BadChat; TooLong as soon as there are too many tokens: rendering the rest could take minutes.
        """
        if not self._tokenizer.chat_template:
            raise BadChat("this model has no chat template; use /v1/completions")
        messages = list(before)
        num_tokens = len(concatenate(before))
        for position, said in enumerate(new):
            is_last = position + 1 == len(new)
            if max(num_tokens, position) >= self._max_tokens:
                raise self._too_long()
            if said.role == "system" and not is_last and not num_tokens:
                ids = []
            else:
                ids = self._ids(messages, said, is_last or new[position + 1].role == ASSISTANT)
            num_tokens += len(ids)
            messages.append(ChatMessage(said.role, said.content, ids))
        return messages[len(before) :]

    def _ids(self, before: Sequence[ChatMessage], said: Said, is_answered: bool) -> list[int]:
        if said.role == ASSISTANT:
            if not before or before[-1].role == ASSISTANT:
                raise BadChat("an assistant message must follow a message of another role")
            return self._encode(self._quote(said.content))
        if not any(message.token_ids for message in before):
            leading = [Said(message.role, message.content) for message in before]
            return self._encode(self._render([*leading, said], is_answered))
        stand_in = _stand_in_conversation(before[-1].role)
        front = self._render(stand_in, False)
        whole = self._render([*stand_in, said], is_answered)
        # Behind an assistant message, from the end of its text on; else from the end of all that was rendered.
        cut = front.rfind(_STAND_IN) + len(_STAND_IN) if stand_in[-1].role == ASSISTANT else len(front)
        if cut < len(_STAND_IN) or whole[:cut] != front[:cut]:
            raise BadChat("the model's chat template rewrites earlier messages when one is added")
        added = whole[cut:]
        last = before[-1]
        if last.role == ASSISTANT and last.token_ids:
            # A reply that ended by itself has the closing token already.
            added = added.removeprefix(self._eos.get(last.token_ids[-1], ""))
        return self._encode(added)

    def _render(self, messages: Sequence[Said], is_answered: bool) -> str:
        conversation = [{"role": said.role, "content": self._quote(said.content)} for said in messages]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=is_answered)
        except TemplateError as error:
            raise BadChat(f"the model's chat template refuses these messages: {error}") from None
        return str(text)

    def _quote(self, content: str) -> str:
        """Put a stand-in for each marker that the text of a message holds."""
        return self._marker.sub(lambda found: f"{self._nonce}{self._numbers[found[0]]:06d}", content)

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text: those of its markers, and where one was quoted those of its letters."""
        ids: list[int] = []
        for position, part in enumerate(self._quoted.split(text)):
            if position % 2:
                marker = self._markers[int(part)]
                # Cut in two it is no marker any more; its rest may hold another one.
                ids += self._encode(marker[:1]) + self._encode(self._quote(marker[1:]))
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False)
            if len(ids) > self._max_tokens:
                raise self._too_long()
        return ids

    def _too_long(self) -> TooLong:
        return TooLong(f"the messages have more tokens than fit; the model's context is {self._max_tokens}")


def match_history(remembered: Sequence[ChatMessage], history: Sequence[Said]) -> int:
    """Return how many leading messages of `history` are the remembered ones and can keep their ids."""
    count = 0
    for old, said in zip(remembered, history, strict=False):
        if (old.role, old.content) != (said.role, said.content):
            break
        count += 1
    # Ids end with the prompt for a reply just where a reply followed: where that differs they cannot be kept.
    roles_then, roles_now = [old.role for old in remembered], [said.role for said in history]
    while count and roles_now[count - 1] != ASSISTANT:
        if _is_answered(roles_then, count - 1) == _is_answered(roles_now, count - 1):
            break
        count -= 1
    return count


def concatenate(messages: Sequence[ChatMessage]) -> list[int]:
    """Return the tokens of the sequence that these messages are."""
    return [token for message in messages for token in message.token_ids]


class TextStream:
    """Turns a reply's tokens, as they come, into text; pieces put together are `text`.

    A character may need several tokens, so what is not yet a whole one is kept back until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        # Tokens of the text shown last: some tokenizers write a token differently at the start of a text.
        self._context: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """Return the text that the token completes; often "", never text that a later token would change."""
        self._pending.append(token)
        return self._take(is_last=False)

    def finish(self) -> str:
        """Return what was kept back."""
        return self._take(is_last=True)

    def _take(self, is_last: bool) -> str:
        before = self._decode(self._context)
        piece = self._decode(self._context + self._pending)[len(before) :]
        if not is_last and (not piece or piece.endswith("\ufffd")):
            return ""
        if self._pending:
            self._context, self._pending = self._pending, []
        self.text += piece
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


def _markers(tokenizer: Tokenizer) -> list[str]:
    """Return the texts that become one token with a meaning of its own, longest first.

    Of the added tokens that are not special those that the template uses; others (runs of spaces) are mere text.
    """
    template = str(tokenizer.chat_template)
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    added |= {str(token.content) for token in tokenizer.added_tokens_decoder.values() if str(token.content) in template}
    return sorted((text for text in added if len(text) > 1 and not text.isspace()), key=lambda text: (-len(text), text))


def _is_answered(roles: Sequence[str], position: int) -> bool:
    return position + 1 == len(roles) or roles[position + 1] == ASSISTANT


def _stand_in_conversation(last_role: str) -> list[Said]:
    """Return a short conversation that ends with this role, for templates that look at what came just before."""
    last = Said(last_role, _STAND_IN)
    return [Said("user", _STAND_IN), last] if last_role == ASSISTANT else [last]
