"""Probes taken again and again, while the model rests: the best of them is what the machine can do."""

from __future__ import annotations

from tools.doctor.probe import Ceiling, measure_ceiling


class Probes:
    """`copy_bytes` as in `measure_ceiling`. `best`: None as long as no probe has ended well."""

    def __init__(self, *, copy_bytes: int) -> None:
        self._copy_bytes = copy_bytes
        self.best: Ceiling | None = None

    async def take(self, threads: int) -> None:
        """Probe once more, as `threads` use the memory."""
        self.best = better(self.best, await measure_ceiling(threads=threads, copy_bytes=self._copy_bytes))


def better(one: Ceiling | None, other: Ceiling | None) -> Ceiling | None:
    """The best of two probes, figure by figure: whatever disturbs only makes them worse."""
    if one is None or other is None:
        return one or other
    return Ceiling(
        max(one.bytes_per_s, other.bytes_per_s),
        max((each.flops for each in (one, other) if each.flops is not None), default=None),
        min((each.multiplication_s for each in (one, other) if each.multiplication_s is not None), default=None),
    )
