"""One writer per run folder: a locked file that names the process holding it."""

import fcntl
import json
import os
import socket
from pathlib import Path

from train.exits import WriterLockError


class WriterLock:
    """Hold `folder/writer.lock` until `release`, or fail at once.

    The kernel drops the lock when its process dies, however it dies, so the stale file of a dead process on this
    machine is taken over. Of a holder on another machine nothing can be known: it is refused until the file is removed.

    Raises:
        WriterLockError: another process holds the lock.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder) / "writer.lock"
        self._descriptor: int | None = None
        while self._descriptor is None:
            self._descriptor = self._acquire()

    def _acquire(self) -> int | None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_current(descriptor):  # the former holder removed the file between our two calls
                os.close(descriptor)
                return None
            holder = self._holder(descriptor)
            if holder is not None and holder["host"] != socket.gethostname():
                raise BlockingIOError
        except BlockingIOError as error:
            holder = self._holder(descriptor)
            os.close(descriptor)
            who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
            raise WriterLockError(
                f"{who} writes to {self.path.parent}. Wait for it or stop it; if it is gone for good, remove "
                f"{self.path}; or choose another --workdir."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _holder(self, descriptor: int) -> dict[str, object] | None:
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            return {"pid": holder["pid"], "host": holder["host"]}
        except (ValueError, KeyError, TypeError):  # empty: just made, or its writer was killed before it wrote
            return None

    def release(self) -> None:
        """Remove the file and let the next writer in; a second call does nothing."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
