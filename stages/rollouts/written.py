"""Prompts that a client has written itself, without the chat template.

One that begins with an earlier prompt and its answer continues from the ids that were sampled, as far as the client has
kept their text; only what it has added is encoded.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from stages.rollouts.chat_template import ChatTemplate
from stages.rollouts.engines.stopping import TextOf
from stages.rollouts.sequence import TokenSequence


@dataclass(frozen=True, eq=False)
class Written:
    """A prompt as text, and what was sampled after it."""

    text: str
    prompt: TokenSequence
    sequence: TokenSequence
    """Prompt and answer."""
    raw: str
    """The answer as it was decoded."""
    text_of: TextOf
    """Of the first few sampled ids."""
    stop_id: int | None
    """The stop token that was sampled last; None: none was."""

    def kept(self, text: str, template: ChatTemplate) -> tuple[int, str]:
        """How many of the sampled ids a prompt that begins with this one holds, and its text after them."""
        rest = text[len(self.text) :]
        sampled = self.sequence.ids[len(self.prompt) :]
        n = len(sampled) - (self.stop_id is not None)
        if rest.startswith(self.raw):
            rest = rest[len(self.raw) :]
            closing = "" if self.stop_id is None else template.token_text(self.stop_id)
            return (len(sampled), rest[len(closing) :]) if closing and rest.startswith(closing) else (n, rest)
        kept, lost = 0, n
        while lost - kept > 1:
            middle = (kept + lost) // 2
            if rest.startswith(self.text_of(sampled[:middle])):
                kept = middle
            else:
                lost = middle
        return kept, rest[len(self.text_of(sampled[:kept])) :]


@dataclass(frozen=True, eq=False)
class Continued:
    """A prompt that begins with what was sampled before."""

    ids: TokenSequence
    added: str
    """What the client has written after it."""
    whole: Written | None
    """What it continues with all ids; None: some of those that were sampled are not in it."""


def continued(text: str, earlier: Iterable[Written], template: ChatTemplate) -> Continued | None:
    """The prompt with as many as possible of the ids that were sampled before; None: it begins with none of them."""
    best: tuple[int, int, Written, str] | None = None
    for written in earlier:
        if text.startswith(written.text):
            n, added = written.kept(text, template)
            if (n or not added) and (best is None or len(written.prompt) + n >= best[0]):
                best = (len(written.prompt) + n, n, written, added)
    if best is None:
        return None
    _, n, written, added = best
    sampled = written.sequence.ids[len(written.prompt) :]
    is_whole = n == len(sampled)
    base = written.sequence if is_whole else written.prompt.extended(sampled[:n])
    ids = base.extended(template.encode_after(written.stop_id if is_whole else None, added)) if added else base
    return Continued(ids, added, written if is_whole else None)
