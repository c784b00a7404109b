"""Handlers of signals that wait; Ctrl-C anywhere, and what it leaves: tests/fuzz/interrupts.py."""

import asyncio
import signal

import pytest


def test_handlers_that_waited_are_called_once():
    from vecenv.core.ending import interrupts_later

    before = signal.getsignal(signal.SIGINT)
    loop, told = asyncio.new_event_loop(), []

    async def be_interrupted() -> None:
        loop.add_signal_handler(signal.SIGINT, told.append, 1)
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
            assert not told
        await asyncio.sleep(0.01)

    try:
        loop.run_until_complete(be_interrupted())
        loop.close()
        assert told == [1]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), interrupts_later(), interrupts_later():
            signal.raise_signal(signal.SIGINT)
            told.append(2)
        assert told == [1, 2]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
