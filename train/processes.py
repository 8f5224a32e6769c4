"""Several processes as one run: how they meet, agree, stop at the same step, and end when one of them is lost."""

import faulthandler
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.exits import DistributedError, StorageError, UsageError


def join_processes(
    *,
    distributed: str = "",
    coordinator: str = "",
    num_processes: int | None = None,
    process_id: int | None = None,
    join_timeout: int = 300,
    peer_timeout: int = 100,
) -> None:
    """Meet the other processes of the run; must come before the first use of a device. A lone process goes on alone.

    Args:
      distributed: "auto": jax finds the others by Cloud TPU's metadata, SLURM, Open MPI or Kubernetes; "": by
        `coordinator`, or by the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, if given.
      coordinator: host:port that process 0 opens and all reach.
      num_processes, process_id: how many, and which one this is, from 0.
      join_timeout: seconds to wait for the others.
      peer_timeout: seconds without a sign of life of a process, after which the others end.

    Raises:
      UsageError: flags that do not belong together.
      DistributedError: the others did not come, or no cluster was found.
    """
    if jax.distributed.is_initialized():
        return
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    num_processes = _from_environment("num_processes", num_processes, "JAX_NUM_PROCESSES")
    process_id = _from_environment("process_id", process_id, "JAX_PROCESS_ID")
    if not (coordinator or distributed):
        if num_processes is not None or process_id is not None:
            raise UsageError("--num_processes and --process_id need --coordinator=HOST:PORT, where process 0 listens.")
        return
    if not distributed:
        _check_address(coordinator, num_processes, process_id)
    who = "this process" if process_id is None else f"process {process_id} of {num_processes}"
    failure = (
        f"{who} did not meet the others at {coordinator or 'the address that was found'} within {join_timeout} s. "
        "Start every process, each with the same --coordinator and --num_processes and a --process_id of its own; see "
        "that process 0 runs, that its port is open to the others and free, and that no proxy variable is in the way; "
        "--join_timeout waits longer."
    )
    # jax itself aborts the process when its time is over, with a stack and no advice: ours is over first.
    timer = threading.Timer(join_timeout, _give_up, [failure])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator or None,
            num_processes=num_processes,
            process_id=process_id,
            cluster_detection_method=None if distributed else "deactivate",
            initialization_timeout=join_timeout + 60,
            heartbeat_timeout_seconds=peer_timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if distributed and not coordinator and isinstance(error, ValueError):
            raise DistributedError(
                f"--distributed=auto found no Cloud TPU slice, SLURM step, Open MPI or Kubernetes job around this "
                f"process ({reason}): start it by that system's launcher, or give --coordinator, --num_processes and "
                "--process_id."
            ) from error
        raise DistributedError(f"{failure} ({reason})") from error
    finally:
        timer.cancel()


def _give_up(failure: str) -> None:
    print(f"error: {failure}", file=sys.stderr, flush=True)
    os._exit(DistributedError.exit_code)


def _check_address(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise UsageError(f"coordinator={coordinator}: wanted HOST:PORT of process 0, as node-0:8476.")
    if num_processes is None or process_id is None:
        raise UsageError(
            f"--coordinator={coordinator} needs --num_processes and --process_id too (or the variables "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID)."
        )
    if process_id >= num_processes:
        raise UsageError(
            f"process_id={process_id} of num_processes={num_processes}: the processes count from 0 to "
            f"{num_processes - 1}."
        )


def _from_environment(name: str, given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable, "")
    if given is not None or not text:
        return given
    if not text.isdecimal():
        raise UsageError(f"{variable}={text}: wanted a whole number, as --{name} takes it.")
    return int(text)


def is_primary() -> bool:
    """Whether this is the process that writes and speaks for all."""
    return jax.process_index() == 0


def from_primary(value: int) -> int:
    """Give the first process's value to all; every process must call it, in the same order."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def check_agreement(values: Mapping[str, Any]) -> None:
    """Refuse to begin where processes differ in what must be the same.

    Args:
      values: name -> anything that JSON can hold.

    Raises:
      DistributedError: in every process; names what differs and where.
      UsageError: devices of several processes, which have not met: a TPU slice shows them without being asked.
    """
    if jax.process_count() == 1:
        return
    if not jax.distributed.is_initialized():
        raise UsageError(
            f"jax sees the devices of {jax.process_count()} processes: pass --distributed=auto to every one of them."
        )
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values.values()]
    digests = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") for text in texts]
    gathered = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for process, row in enumerate(gathered):
        differing = [name for name, same in zip(values, row == gathered[0], strict=True) if not same]
        if differing:
            raise DistributedError(
                f"process {process} differs from process 0 in {', '.join(differing)}: start all processes with the "
                "same flags, the same versions and the same files."
            )


def check_shared_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not one and the same for all processes.

    Raises:
      StorageError: a process does not see what process 0 writes there.
    """
    if jax.process_count() == 1:
        return
    mark = Path(folder) / f".shared-{from_primary(time.time_ns() % 2**31)}"
    if is_primary():
        mark.touch()
    multihost_utils.sync_global_devices("shared folder")
    seen = multihost_utils.process_allgather(np.array(_appears(mark)))
    if is_primary():
        mark.unlink(missing_ok=True)
    if not seen.all():
        blind = ", ".join(map(str, np.flatnonzero(~seen)))
        raise StorageError(
            f"processes {blind} do not see what process 0 writes to {folder}: choose a --workdir on storage that all "
            "machines share."
        )


def _appears(path: Path, *, seconds: float = 10.0) -> bool:
    """Whether a file is there, soon: a network file system may show it late."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


class AnyProcess:
    """Whether a flag is up in any process: the same answer in all of them, without a wait.

    With several processes each call sends this process's flag and answers with the flags of the call before, which
    have arrived meanwhile; every process must call it equally often. A lone process is answered at once.

    Args:
      mesh: the devices of all processes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._votes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._count = mesh.devices.size
        self._any = jax.jit(lambda votes: votes.any(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._former: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        if jax.process_count() == 1:
            return flag
        former = self._former
        votes = jax.make_array_from_callback((self._count,), self._votes, lambda index: np.full(1, flag))
        self._former = self._any(votes)
        return former is not None and bool(former)


class Watchdog:
    """End this process when it makes no progress for too long: a peer may be alive and stuck, which no heartbeat shows.

    Args:
      limit: seconds between two signs of progress; 0, or a lone process: nothing is watched.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit if jax.process_count() > 1 else 0
        self._last = time.monotonic()
        self._stopped = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._limit:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()

    def progress(self) -> None:
        """Say that something was done."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit / 4)):
            if time.monotonic() - self._last > self._limit:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                print(
                    f"error: process {jax.process_index()} made no progress for {self._limit:g} s; another process is "
                    "probably stuck. Restart all processes to resume; --stall_timeout waits longer.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(DistributedError.exit_code)
