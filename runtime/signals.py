"""What ends a run before its time: errors told in one sentence, with an exit code, and signals. Imports no torch."""

import contextlib
import signal
import threading
import time


@contextlib.contextmanager
def catch_signals():
    """Yields a list that collects SIGTERM, SIGINT, SIGUSR1 and SIGHUP by name; a second one ends the process at once.

    Within half a second of the first it counts as the same: systemd and schedulers signal torchrun and its ranks.
    """
    caught, before, since = [], {}, 0.0

    def note(number, _):
        nonlocal since
        if caught and time.monotonic() > since + 0.5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        since = since or time.monotonic()
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        found = [
            number
            for number in signal.Signals
            if number.name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
        ]
        found = [
            number for number in found if signal.getsignal(number) != signal.SIG_IGN
        ]  # as nohup sets it
        before = {number: signal.signal(number, note) for number in found}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
