"""The folder of a run, which one run at a time may use."""

import contextlib
import os
import platform
import time
from pathlib import Path

from common.errors import UserError
from common.values import env_int

try:
    import fcntl  # not on Windows, where a run's folder is not locked
except ImportError:
    fcntl = None


@contextlib.contextmanager
def locked_folder(folder: Path):
    """Context: make a run's folder and lock it. Partial files of a dead run are deleted.

    At the end it is removed, if the run has written nothing. Raises UserError while another run
    uses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with open(lock, "a+") as lock_file:
        wait_for_lock(lock_file, folder)
        lock_file.truncate(0)
        lock_file.write(f"process {os.getpid()} on {platform.node()}")
        lock_file.flush()
        for partial in folder.glob(".tmp-*.*"):  # not a folder that prepare.py makes
            partial.unlink()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if list(folder.iterdir()) == [lock]:
                    lock.unlink()
                    folder.rmdir()


def wait_for_lock(lock_file, folder: Path) -> None:
    """Lock the file. After a restart by torchrun, ranks of the start before have 30 s to end."""
    restarts = env_int("TORCHELASTIC_MAX_RESTARTS", 0)
    deadline = time.monotonic() + (30 if restarts else 0)
    while fcntl:
        try:
            return fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock_file.seek(0)
                raise UserError(
                    f"another run ({lock_file.read()}) is using {folder}; give another "
                    "--out_dir, or wait"
                ) from None
            time.sleep(0.2)
        except OSError:  # some network file systems have no locks
            return None
