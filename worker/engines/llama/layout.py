"""By which kind of batch each token of a request is computed: a pure function of the request alone.

Floating-point sums depend on the kernel that computes them, and llama.cpp's CPU attention has three
(ggml-cpu/ops.cpp): one for batches of 64 tokens or more of a sequence (*wide*, `Q_TILE_SZ`), one for less (*narrow*),
and with several threads one for a token that is computed *alone*, with no neighbour in its batch, behind 256 others
(`use_split_kv_path`). Products with unquantized weights know the difference between alone and not, too. Within a kind,
results are the same to the bit whatever the width of a batch, its position and its neighbours; the warm-up checks it on
the host at hand. So the kind is fixed by the request, and the width is free: as wide as nobody has to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from schemas.job import ChatPrompt, Prompt

WIDE_BATCH: Final = 64
"""Tokens of the smallest batch that llama.cpp's CPU attention computes by its other kernel."""

TOLD_CHUNK: Final = WIDE_BATCH
"""Tokens of a chunk of which the logits of all tokens are wanted, but for a first wide one (`TOLD_ROWS_MAX`)."""
TOLD_ROWS_MAX: Final = 2 * WIDE_BATCH - 1
"""Rows of logits of one batch at most: a wide batch of less than twice the least cannot be divided. llama.cpp has room
for so many, twice: 4 bytes per row and token of the vocabulary (25 MB each for 49,152 tokens, 77 MB for 151,936)."""

NARROW_CHUNK: Final = 48
"""Tokens of a narrow chunk at most."""
NARROW_LEAST: Final = 2
"""Tokens of a narrow chunk at least, where there are so many: a single one is another kind."""

NARROW_BEGINNING: Final = 256
"""Tokens at the beginning of a conversation that begins with less than that: its first answers, which are computed
token by token, can be reused there by the next turn. For other prompts it does not pay: narrow chunks take 1.2 times as
long as wide ones at first, 1.7 times behind 1,000 tokens (a 135M model)."""

BYTES_PER_TOKEN: Final = 4
"""A rule of thumb. Which kind the beginning has must not depend on more than the messages."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The division of a request with `prompt` tokens; what follows them is computed in narrow batches or one by one.

    `chunk`: tokens per chunk that the first attempt chose: below 64, everything is narrow. `narrow`: tokens at the
    beginning that are narrow in any case.
    """

    prompt: int
    chunk: int
    narrow: int = 0

    @property
    def wide(self) -> range:
        """Positions that are computed in wide batches: none, or so many that they fill one."""
        wide = range(min(self.narrow, self.prompt), self.prompt)
        return wide if self.chunk >= WIDE_BATCH and len(wide) >= WIDE_BATCH else range(0)


def chunk_to_repeat(first: int, *, own: int, wide_fits: bool) -> int:
    """Tokens per chunk of a prompt whose first attempt chose `first` (0: unknown), where this engine chose `own`.

    Where wide batches take longer than a step may, an engine that repeated them would be taken for one that hangs.
    """
    return own if first == 0 or (first >= WIDE_BATCH and not wide_fits) else first


def alike(one: Layout, other: Layout) -> int | None:
    """How many tokens are computed by the same kind of batch in both; None = all of them."""
    first, second = one.wide, other.wide
    borders = [border for wide in (first, second) for border in (wide.start, wide.stop)]
    return min((border for border in borders if (border in first) != (border in second)), default=None)


def narrow_beginning(prompt: Prompt) -> int:
    """How many tokens at the beginning of `prompt` are narrow in any case. It is the same for all turns of a
    conversation, since it depends on what stands before the first answer only."""
    if not isinstance(prompt, ChatPrompt):
        return 0
    bytes_before = 0
    for message in prompt.messages:
        if message.get("role") == "assistant":
            break
        bytes_before += len(str(message.get("content", "")).encode(errors="replace"))
    return NARROW_BEGINNING if bytes_before < NARROW_BEGINNING * BYTES_PER_TOKEN else 0
