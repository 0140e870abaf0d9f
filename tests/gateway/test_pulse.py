"""The bus's pulse: silent when our own beats do not come back, and back with the next one that does."""

from gateway.pulse import BusPulse


def test_a_bus_that_hangs_is_silent_until_a_beat_comes_back() -> None:
    back: list[str] = []
    pulse = BusPulse(silence_s=2.0, now=0.0, on_back=lambda: back.append("back"))
    pulse.on_echo(1.0)
    assert not pulse.silent(3.0)
    assert pulse.silent(3.1)
    assert back == []
    pulse.on_echo(8.0)
    assert not pulse.silent(8.0)
    pulse.on_echo(9.0)
    assert back == ["back"], "told once"


def test_time_in_which_nothing_could_come_does_not_count() -> None:
    back: list[str] = []
    pulse = BusPulse(silence_s=2.0, now=0.0, on_back=lambda: back.append("back"))
    pulse.restart_clocks(10.0)
    assert not pulse.silent(12.0)
    pulse.on_echo(12.0)
    assert back == []


def test_a_loop_that_stands_still_now_and_then_does_not_hide_that_the_bus_hangs() -> None:
    pulse = BusPulse(silence_s=2.0, now=0.0, on_back=lambda: None)
    pulse.shift_clocks(1.5, 1.6)
    assert not pulse.silent(3.5)
    assert pulse.silent(3.6)
    pulse.shift_clocks(60.0, 3.6)
    assert not pulse.silent(5.6), "never beyond now"
    assert pulse.silent(5.7)
