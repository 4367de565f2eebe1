"""One conversation: its messages, and the caches that follow them from turn to turn.

Each turn renders the whole conversation through the chat template and reads only what the caches do not cover yet.
Where the rendered history has changed, the caches are trimmed to the common beginning; where they cannot be trimmed,
they are made anew. Knows templates, tokens and caches; knows nothing of terminals or files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..api import GenerationResponse, stream_generate
from ..caches.saved import covers, make_prompt_cache, try_trim
from ..commands.answers import AnswerParts
from ..commands.templates import render
from ..models.context_length import context_length, refuse_overlong
from .settings import Settings


@dataclass
class Turn:
    """The counts of one turn. num_cached and num_read add up to the prompt; notices are for the person."""

    num_cached: int
    num_read: int
    notices: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    response: GenerationResponse | None = None


class Interrupted(Exception):
    """Somebody asked to stop while the prompt was being read."""


class _Answer:
    """An answer as it grows.

    opened: the part of it that the end of the prompt gave. raw: all its text so far. said: the same text by kind,
    without the marks between reasoning, answer and tool calls.
    """

    def __init__(self, tokenizer: Any, kind: str, opened: str):
        self.opened, self.raw, self.said = opened, "", {"reasoning": "", "normal": "", "tool": ""}
        self._parts = AnswerParts(tokenizer, kind)

    def take(self, text: str, is_last: bool) -> Iterator[tuple[str, str]]:
        """Add text; yield the parts of it whose kind is known now, all of them if is_last."""
        self.raw += text
        for kind, part in self._parts.take(text, is_last):
            self.said[kind] = self.said.get(kind, "") + part
            if part:
                yield kind, part


class Conversation:
    """Messages and caches of one chat.

    draft: None generates as plain mlx-lm does. system: the system message, if any. template_options: of the chat
    template. options: further arguments of stream_generate, such as block_size and prefill_step_size.
    caches, pieces: the prompt cache, and what it covers as (text, tokens) in order: prompts and answers as they were
    read and written. Raises ValueError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        draft: Any = None,
        *,
        system: str | None = None,
        settings: Settings | None = None,
        template_options: dict[str, Any] | None = None,
        **options: Any,
    ):
        if not tokenizer.has_chat_template:
            raise ValueError(
                "this model's tokenizer has no chat template; python -m mlx_dflash.generate takes bare prompts"
            )
        self.model, self.tokenizer, self._draft = model, tokenizer, draft
        self.drafting = draft is not None
        self.system, self.settings = system, settings or Settings()
        self._template_options, self._options = template_options or {}, options
        self.messages: list[dict[str, str]] = []
        self.turn: Turn | None = None
        self._forget()

    def _forget(self) -> None:
        """Start with empty caches."""
        self.caches = make_prompt_cache(self.model, self.draft)
        self.pieces: list[tuple[str, list[int]]] = []

    @property
    def draft(self) -> Any:
        """The draft if it is in use, else None."""
        return self._draft if self.drafting else None

    @property
    def covered(self) -> list[int]:
        """The tokens that the caches cover."""
        return [token for _, tokens in self.pieces for token in tokens]

    def use_draft(self, use: bool) -> None:
        """Draft or do not; the conversation is then read anew. Raises ValueError if there is no draft."""
        if use and self._draft is None:
            raise ValueError("this chat was started without a draft")
        if use != self.drafting:
            self.drafting = use
            self._forget()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = []
        self._forget()

    def undo(self) -> str:
        """Take back the last message and its answer; return the message. Raises ValueError if there is none."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if last is None:
            raise ValueError("there is nothing to take back")
        text = self.messages[last]["content"]
        del self.messages[last:]
        return text

    def drop(self) -> str:
        """Forget the oldest turn; return its message. Raises ValueError if there is none."""
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not asked:
            raise ValueError("there is nothing to forget")
        text = self.messages[asked[0]]["content"]
        del self.messages[: asked[1] if len(asked) > 1 else len(self.messages)]
        return text

    def ask(
        self,
        text: str,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Send a message; yield the answer as (kind, text), kind one of "reasoning", "normal", "tool".

        should_stop is asked between tokens; what was said by then stays in the conversation. If it stops the reading
        of the prompt, or if that fails, the message was never sent. self.turn
        tells what happened. Raises Overlong if the context has no room for the message.
        """
        self.messages.append({"role": "user", "content": text})
        num_messages = len(self.messages)
        try:
            yield from self._answer(should_stop, progress)
        finally:
            if len(self.messages) == num_messages:
                self.messages.pop()

    def _answer(
        self, should_stop: Callable[[], bool], progress: Callable[[int, int], None] | None
    ) -> Iterator[tuple[str, str]]:
        prompt = self._render()
        refuse_overlong(self.model, len(self._encode(prompt)))
        tokens, self.turn = self._read_from(prompt)
        answer = _Answer(self.tokenizer, *self._initial_state(prompt))
        num_cached, responses = self.turn.num_cached, None
        try:
            responses = self._generate(tokens[num_cached:], self._room(len(tokens)), (should_stop, progress))
            for response in responses:
                self.turn.response = response
                self.turn.tokens.append(response.token)
                is_last = response.finish_reason is not None or should_stop()
                yield from answer.take(response.text, is_last)
                if is_last:
                    break
        except Interrupted:
            self.turn.notices.append("stopped before the message was read; it was not sent")
        except GeneratorExit:
            raise
        except BaseException:
            # Where the caches stand is unknown now; the next turn reads the conversation anew.
            self._forget()
            self.turn.tokens = []
            raise
        finally:
            if responses is not None:
                responses.close()
            if self.turn.tokens:
                self.pieces.append((answer.raw + self._ending(), list(self.turn.tokens)))
                self.messages.append(self._history_message(answer))
            else:
                self._after_no_answer(num_cached)

    def _room(self, prompt_length: int) -> int:
        """Return the most tokens of an answer: those of the settings, or what the context has room for."""
        limit, wanted = context_length(self.model), self.settings.max_tokens
        if limit is None:
            return wanted
        room = limit - prompt_length
        return room if wanted < 0 else min(wanted, room)

    def _generate(
        self,
        tokens: list[int],
        max_tokens: int,
        watchers: tuple[Callable[[], bool], Callable[[int, int], None] | None],
    ) -> Iterator[GenerationResponse]:
        """Continue the caches with these tokens. The iterator raises Interrupted if the reading of them is stopped.

        watchers: should_stop and progress of ask.
        """
        should_stop, progress = watchers

        def watched(done: int, total: int) -> None:
            if should_stop():
                raise Interrupted
            if progress is not None:
                progress(done, total)

        # The other options are about drafting.
        names = self._options if self.draft is not None else self._options.keys() & {"prefill_step_size"}
        return stream_generate(
            self.model,
            self.tokenizer,
            tokens,
            max_tokens,
            self.draft,
            sampler=self.settings.sampler(self.tokenizer),
            prompt_cache=self.caches,
            prompt_progress_callback=watched,
            **{name: self._options[name] for name in names},
        )

    def _after_no_answer(self, num_cached: int) -> None:
        """Keep the pieces that the caches still cover, or make the caches anew if they cover something else."""
        if self.draft is None or not covers(self.caches, num_cached):
            self._forget()
            return
        pieces, left = [], num_cached
        for text, tokens in self.pieces:
            if left:
                pieces.append((text if len(tokens) <= left else "", tokens[:left]))
            left -= min(left, len(tokens))
        self.pieces = pieces

    def _ending(self) -> str:
        """Return the text of the token that ended the answer, which is no part of the answer's own text."""
        last = self.turn.tokens[-1]
        return self.tokenizer.decode([last]) if self.turn.response.finish_reason == "stop" else ""

    # Rendering.

    def _render(self) -> str:
        """Return the whole conversation as text, up to where the answer begins."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = dict(self._template_options)
        if self.tokenizer.has_thinking:
            options.setdefault("enable_thinking", self.settings.thinking)
        return render(self.tokenizer, system + self.messages, **options)

    def _initial_state(self, prompt: str) -> tuple[str, str]:
        """Return the kind of text that the answer begins with, and the part of it that the prompt already ends with."""
        if self.tokenizer.response_initial_state:
            return self.tokenizer.response_initial_state, ""
        if self.tokenizer.has_thinking:
            start = prompt.rfind(self.tokenizer.think_start)
            if start > prompt.rfind(self.tokenizer.think_end):
                return "reasoning", prompt[start:]
        return "normal", ""

    def _history_message(self, answer: "_Answer") -> dict[str, str]:
        """Return the answer as the template wants it: with reasoning in a field of its own, or as it was written."""
        template = str(getattr(self.tokenizer, "chat_template", "") or "")
        message, said = {"role": "assistant", "content": answer.opened + answer.raw}, answer.said
        if said["reasoning"]:
            for name in ("reasoning_content", "thinking"):
                if f".{name}" in template or f"'{name}'" in template or f'"{name}"' in template:
                    return {**message, "content": said["normal"].lstrip("\n"), name: said["reasoning"].strip("\n")}
        return {**message, "content": said["normal"]} if self.tokenizer.response_transitions else message

    # Caches.

    def _read_from(self, prompt: str) -> tuple[list[int], Turn]:
        """Trim the caches to where they agree with the prompt; return the prompt's tokens, and the turn that begins."""
        pieces, tokens, rest = self._tokens_of(prompt)
        covered = self.covered
        num_same = next((i for i, (a, b) in enumerate(zip(covered, tokens)) if a != b), min(len(covered), len(tokens)))
        keep = min(num_same, len(tokens) - 1)
        notices = []
        if len(covered) > keep and not try_trim(self.caches, len(covered) - keep):
            if keep:
                notices.append(
                    f"the caches cannot go back by {len(covered) - keep} tokens: reading the conversation again"
                )
            self._forget()
            keep = 0
        self.pieces = [*pieces, (rest, tokens[sum(len(t) for _, t in pieces) :])] if rest else pieces
        return tokens, Turn(keep, len(tokens) - keep, notices)

    def _tokens_of(self, prompt: str) -> tuple[list[tuple[str, list[int]]], list[int], str]:
        """Tokenize the prompt's text, with the tokens of the caches as far as their text is its beginning.

        Another tokenization of the same text would be as good, but is not what the caches hold.
        Returns the pieces that were taken over, all tokens, and the text after those pieces.
        """
        pieces, end = [], 0
        for text, tokens in self.pieces:
            if not text or not prompt.startswith(text, end):
                break
            pieces.append((text, tokens))
            end += len(text)
        whole = self._encode(prompt)
        joined = [token for _, tokens in pieces for token in tokens] + (
            self._encode(prompt[end:]) if end < len(prompt) else []
        )
        if self.tokenizer.decode(joined) == self.tokenizer.decode(whole):
            return pieces, joined, prompt[end:]
        return [], whole, prompt

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
