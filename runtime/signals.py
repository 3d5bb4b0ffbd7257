"""Signals that ask a run to save and end."""

import contextlib
import signal
import threading
import time

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")

# Schedulers signal both torchrun and its ranks, and torchrun passes it on: what comes within half a
# second of the first signal is the same one
SAME_SIGNAL_S = 0.5


@contextlib.contextmanager
def catch_signals():
    """Yield a list that collects the names of signals. A second one ends the process at once."""
    caught = []
    first_at = 0.0

    def handle(number, _frame):
        nonlocal first_at
        if not caught:
            first_at = time.monotonic()
        elif time.monotonic() > first_at + SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        caught.append(signal.Signals(number).name)

    handlers = {}  # as they were
    if threading.current_thread() is threading.main_thread():
        for number in signal.Signals:
            ignored = signal.getsignal(number) == signal.SIG_IGN  # as nohup sets it
            if number.name in NAMES and not ignored:
                handlers[number] = signal.signal(number, handle)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
