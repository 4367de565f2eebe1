"""One conversation: its messages, and the caches that follow them from turn to turn.

Each turn renders the whole conversation through the chat template and reads only what the caches do not cover yet.
Where the rendered history has changed, the caches go back to the common beginning; where they cannot, they are
made anew. Knows templates, tokens and caches; knows nothing of terminals.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from ..api import GenerationResponse, stream_generate
from ..caches.saved import covers, load_prompt_cache, make_prompt_cache, save_prompt_cache, try_trim
from .settings import Settings

CONVERSATION_KEY = "conversation"


@dataclass
class Turn:
    """What one turn read and wrote. num_cached and num_read add up to the prompt; notices are for the person."""

    num_cached: int
    num_read: int
    notices: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    response: GenerationResponse | None = None


class Interrupted(Exception):
    """Somebody asked to stop while the prompt was being read."""


class _Answer:
    """An answer's text as it comes. opened: the part of it that the prompt's end gave; raw: all the text; said: the
    same by kind, without the marks between reasoning, answer and tool calls.
    """

    def __init__(self, tokenizer: Any, kind: str, opened: str):
        self.opened, self.raw = opened, ""
        self.said = {"reasoning": "", "normal": "", "tool": ""}
        self._state = make_text_state_machine(tokenizer).make_state(kind)

    def take(self, text: str, is_last: bool) -> Iterator[tuple[str, str]]:
        """Add text; yield what is now known to be of a kind, all of it if it is the last."""
        self.raw += text
        self._state, segments = TextStateMachine.split(self._state, text)
        if is_last:
            self._state, rest, kind = TextStateMachine.flush(self._state)
            segments.append((kind, rest))
        for kind, piece in segments:
            self.said[kind] = self.said.get(kind, "") + piece
            if piece:
                yield kind, piece


class Conversation:
    """Messages and caches of one chat.

    model, tokenizer, draft: a pair, draft None for plain mlx-lm. system: the system message, if any.
    options: more arguments of stream_generate (block_size, prefill_step_size, ...). template_options: for the
    chat template. Raises ValueError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        draft: Any = None,
        *,
        system: str | None = None,
        settings: Settings | None = None,
    ):
        if not tokenizer.has_chat_template:
            raise ValueError(
                "this model's tokenizer has no chat template; python -m mlx_dflash.generate takes bare prompts"
            )
        self.model, self.tokenizer, self._draft = model, tokenizer, draft
        self.drafting = draft is not None
        self.settings = settings or Settings()
        self.options: dict[str, Any] = {}
        self.template_options: dict[str, Any] = {}
        self.messages: list[dict[str, str]] = []
        self.system = system
        self.turn: Turn | None = None
        self._forget()

    def _forget(self) -> None:
        """Start with empty caches."""
        self._caches = make_prompt_cache(self.model, self.draft)
        # What the caches cover, as (text, tokens) in order: prompts and answers as they were read and written.
        self._pieces: list[tuple[str, list[int]]] = []

    @property
    def draft(self) -> Any:
        """The draft if it is in use, else None."""
        return self._draft if self.drafting else None

    @property
    def covered(self) -> list[int]:
        """The tokens that the caches cover."""
        return [token for _, tokens in self._pieces for token in tokens]

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

    def ask(
        self,
        text: str,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Send a message; yield the answer as (kind, text), kind one of "reasoning", "normal", "tool".

        should_stop is asked between tokens; what was said by then stays in the conversation. If it stops the reading
        of the prompt, or if that fails, the message was never sent. self.turn tells what happened.
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
        tokens, self.turn = self._read_from(prompt)
        num_cached = self.turn.num_cached

        def watched(done: int, total: int) -> None:
            if should_stop():
                raise Interrupted
            if progress is not None:
                progress(done, total)

        answer = _Answer(self.tokenizer, *self._initial_state(prompt))
        options = (
            self.options
            if self.draft is not None
            else {k: v for k, v in self.options.items() if k == "prefill_step_size"}
        )
        responses = None
        try:
            responses = stream_generate(
                self.model,
                self.tokenizer,
                tokens[num_cached:],
                self.settings.max_tokens,
                self.draft,
                sampler=self.settings.sampler(self.tokenizer),
                prompt_cache=self._caches,
                prompt_progress_callback=watched,
                **options,
            )
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
                self._pieces.append((answer.raw + self._ending(), list(self.turn.tokens)))
                self.messages.append(self._history_message(answer))
            else:
                self._after_no_answer(num_cached)

    def _after_no_answer(self, num_cached: int) -> None:
        """The caches cover what they did before the reading, or, where they cannot go back to it, are made anew."""
        if self.draft is None or not covers(self._caches, num_cached):
            self._forget()
            return
        pieces, left = [], num_cached
        for text, tokens in self._pieces:
            if left:
                pieces.append((text if len(tokens) <= left else "", tokens[:left]))
            left -= min(left, len(tokens))
        self._pieces = pieces

    def _ending(self) -> str:
        """The text of the token that ended the answer, which is no part of the answer's text."""
        last = self.turn.tokens[-1]
        return self.tokenizer.decode([last]) if self.turn.response.finish_reason == "stop" else ""

    # Rendering.

    def _render(self) -> str:
        """The whole conversation as text, up to where the answer begins."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = dict(self.template_options)
        if self.tokenizer.has_thinking:
            options.setdefault("enable_thinking", self.settings.thinking)
        return self.tokenizer.apply_chat_template(
            system + self.messages, tokenize=False, add_generation_prompt=True, **options
        )

    def _initial_state(self, prompt: str) -> tuple[str, str]:
        """The state in which the answer begins, and the part of the answer that the prompt's end already gave."""
        if self.tokenizer.response_initial_state:
            return self.tokenizer.response_initial_state, ""
        if self.tokenizer.has_thinking:
            start = prompt.rfind(self.tokenizer.think_start)
            if start > prompt.rfind(self.tokenizer.think_end):
                return "reasoning", prompt[start:]
        return "normal", ""

    def _history_message(self, answer: "_Answer") -> dict[str, str]:
        """The answer as the template wants it: reasoning in a field of its own if it has one, else as it was written."""
        template = str(getattr(self.tokenizer, "chat_template", "") or "")
        message, said = {"role": "assistant", "content": answer.opened + answer.raw}, answer.said
        if said["reasoning"]:
            for name in ("reasoning_content", "thinking"):
                if f".{name}" in template or f"'{name}'" in template or f'"{name}"' in template:
                    return {**message, "content": said["normal"].lstrip("\n"), name: said["reasoning"].strip("\n")}
        return {**message, "content": said["normal"]} if self.tokenizer.response_transitions else message

    # Caches.

    def _read_from(self, prompt: str) -> tuple[list[int], Turn]:
        """The prompt's tokens, and how many of them the caches cover after going back to where they agree."""
        pieces, tokens, rest = self._tokens_of(prompt)
        covered = self.covered
        num_same = next((i for i, (a, b) in enumerate(zip(covered, tokens)) if a != b), min(len(covered), len(tokens)))
        keep = min(num_same, len(tokens) - 1)
        notices = []
        if len(covered) > keep and not try_trim(self._caches, len(covered) - keep):
            if keep:
                notices.append(
                    f"the caches cannot go back by {len(covered) - keep} tokens: reading the conversation again"
                )
            self._forget()
            keep = 0
        self._pieces = [*pieces, (rest, tokens[sum(len(t) for _, t in pieces) :])] if rest else pieces
        return tokens, Turn(keep, len(tokens) - keep, notices)

    def _tokens_of(self, prompt: str) -> tuple[list[tuple[str, list[int]]], list[int], str]:
        """Tokens of the prompt's text, those of the caches as far as their text is its beginning.

        Another tokenization of the same text would be as good, but is not what the caches hold.
        Returns the pieces taken over, all tokens, and the text behind the pieces.
        """
        pieces, end = [], 0
        for text, tokens in self._pieces:
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

    # Files.

    def as_dict(self) -> dict[str, Any]:
        """The conversation without its caches, ready for JSON."""
        return {"system": self.system, "messages": self.messages, "drafting": self.drafting}

    def load_dict(self, saved: dict[str, Any]) -> None:
        """Continue a saved conversation. Raises ValueError if it is none."""
        messages = saved.get("messages") if isinstance(saved, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
        ):
            raise ValueError(
                "expected a saved conversation: an object with the key 'messages', a list of role and content"
            )
        self.messages, self.system = messages, saved.get("system")
        self._forget()

    def save(self, file_name: str, metadata: dict[str, str] | None = None) -> None:
        """Save the conversation as JSON, or with its caches if the name ends in .safetensors."""
        if not file_name.endswith(".safetensors"):
            with open(file_name, "w") as file:
                json.dump(self.as_dict(), file, indent=1, ensure_ascii=False)
            return
        if not self._pieces:
            raise ValueError("there is nothing to save yet")
        record = json.dumps({**self.as_dict(), "pieces": self._pieces})
        save_prompt_cache(file_name, self._caches, {**(metadata or {}), CONVERSATION_KEY: record})

    def load(self, file_name: str, metadata: dict[str, str] | None = None) -> bool:
        """Continue what save wrote. Returns whether its caches are in use; if not, the next turn reads it all again.

        metadata: what the file must have been saved with. Raises ValueError if it was not, or is no conversation.
        """
        if not file_name.endswith(".safetensors"):
            with open(file_name) as file:
                self.load_dict(json.load(file))
            return False
        caches, found = load_prompt_cache(file_name, return_metadata=True)
        if CONVERSATION_KEY not in found:
            raise ValueError(
                f"{file_name} has caches, but no record of a conversation; a chat can continue only what a chat saved"
            )
        for name, expected in (metadata or {}).items():
            if found.get(name) != expected:
                raise ValueError(f"{file_name} was saved with the {name} {found.get(name)}, this chat has {expected}")
        saved = json.loads(found[CONVERSATION_KEY])
        self.load_dict(saved)
        if saved["drafting"] != self.drafting or len(caches) != len(self._caches):
            return False
        self._caches, self._pieces = caches, [(text, tokens) for text, tokens in saved["pieces"]]
        return True


def plain_seconds_per_token(model: Any, steps: int = 4) -> float:
    """Measure one token of plain decoding at a short context, without a chat's overhead: the median of a few steps."""
    from mlx_lm.models.cache import make_prompt_cache as make_plain_cache

    caches = make_plain_cache(model)
    mx.eval(model(mx.array([[0] * 8]), cache=caches))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        mx.eval(model(mx.array([[0]]), cache=caches))
        times.append(time.perf_counter() - started)
    return statistics.median(times)
