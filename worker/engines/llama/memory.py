"""The cells of one llama.cpp context."""

from __future__ import annotations

from worker.engines.llama import binding


class KvMemory:
    """`cells.Memory` on llama.cpp."""

    whole = 0

    def __init__(self, context: binding.Context) -> None:
        self._context = context

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        binding.drop_cells(self._context, slot)

    def cut(self, slot: int, keep: int) -> bool:
        """Drop all but the first `keep` cells. False = this memory cannot, and nothing changed."""
        return binding.truncate_cells(self._context, slot, keep=keep)

    def copy(self, source: int, target: int) -> bool:
        """Make `target` a copy of `source`. False = no room; `target` is empty then."""
        return binding.copy_cells(self._context, source, target)

    def swap(self, one: int, other: int) -> bool:
        """Exchange two slots. False = no room; both are empty then."""
        return binding.swap_cells(self._context, one, other)


class WindowMemory(KvMemory):
    """The same for a model with sliding windows, in slots of `whole` cells. Its context has a sequence more than there
    are slots."""

    def __init__(self, context: binding.Context, *, whole: int) -> None:
        super().__init__(context)
        self.whole = whole

    def copy(self, source: int, target: int) -> bool:
        """Make `target` a copy of `source`. There is always room."""
        binding.copy_all_cells(self._context, source, target)
        return True
