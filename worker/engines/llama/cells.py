"""Which slot of the KV memory belongs to whom, and what is in it: the only place that takes and frees cells.

A slot is a llama.cpp sequence id with a full context of cells of its own, so a sequence can never run out of cells and
never touches another's.
"""

from __future__ import annotations

from worker.engines.llama import binding


class KvCells:
    """Slots of one context. A free slot is always empty."""

    def __init__(self, context: binding.Context, *, slots: int) -> None:
        self._context = context
        self._free = list(range(slots))
        self._computed: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Slots that `take` can give."""
        return len(self._free)

    def take(self) -> int:
        """An empty slot, the lowest one: low, dense sequence ids are computed in the fewest passes."""
        self._free.sort()
        slot = self._free.pop(0)
        self._computed[slot] = 0
        return slot

    def computed(self, slot: int) -> int:
        """Tokens in a taken slot, hence the position of its next token."""
        return self._computed[slot]

    def extend(self, slot: int, *, tokens: int) -> None:
        """Note that a batch added `tokens` tokens to a taken slot."""
        self._computed[slot] += tokens

    def release(self, slot: int) -> None:
        """Empty a taken slot, whatever a failed batch may have left in it, and give it back."""
        del self._computed[slot]
        binding.drop_cells(self._context, slot)
        self._free.append(slot)
