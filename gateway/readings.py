"""What a scrape of the metrics reads off the gateway's parts."""

from __future__ import annotations

from bus.connection import BusCounters
from gateway.frame_stream import StreamCounters
from gateway.metrics import Reading


def count_faults(bus: BusCounters, streams: StreamCounters) -> dict[str, Reading]:
    """What went wrong on the bus and in the streams of frames so far."""
    return {
        "bus_disconnects": ("Bus connections lost.", bus.disconnects),
        "bus_reconnects": ("Bus connections that came back.", bus.reconnects),
        "bus_errors": ("Errors reported by the bus client.", bus.errors),
        "bus_dropped_messages": ("Messages dropped because the reader was too slow.", bus.slow_consumer_drops),
        "bus_malformed_messages": ("Messages that could not be read.", bus.malformed),
        "frame_gaps": ("Gaps seen in frame numbers.", streams.gaps),
        "frame_duplicates": ("Frames that came twice.", streams.duplicates),
        "frame_resends": ("Times frames were asked for again.", streams.resends),
        "frames_unknown": ("Frames of claims that are over.", streams.unknown),
    }
