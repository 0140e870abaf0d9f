"""What is counted on the bus and in the streams of frames can be read as a metric."""

from __future__ import annotations

from dataclasses import fields

from bus.connection import BusCounters
from gateway.frame_stream import StreamCounters
from gateway.readings import count_faults


def test_whatever_is_counted_is_exported() -> None:
    bus = BusCounters(*range(1, 1 + len(fields(BusCounters))))
    streams = StreamCounters(*range(101, 101 + len(fields(StreamCounters))))
    counted = {getattr(each, field.name) for each in (bus, streams) for field in fields(each)}
    assert {value for _, value in count_faults(bus, streams).values()} == counted
