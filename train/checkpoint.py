"""Checkpoints: one writer, verified steps, fall-back to an older one. The only module that calls Orbax.

    folder/<step>/            what Orbax wrote (state, data) and manifest.json, written last
    folder/pending.json       the step that is being saved
    folder/set_aside/         damaged steps that stood in the way of a resumed run
    folder/writer.lock        who writes here
"""

import dataclasses
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from train.exits import CheckpointCorruptError, NonFiniteError, StorageError, UsageError
from train.files import replace_file
from train.leaves import check_leaves, leaf_table, nonfinite_leaves
from train.manifest import DamageError, read_manifest, verify, write_manifest
from train.processes import from_primary, is_primary
from train.writer_lock import WriterLock

_PENDING = "pending.json"
_SET_ASIDE = "set_aside"
_OWN = {_PENDING, _SET_ASIDE, "writer.lock"}
_UNFINISHED = re.compile(r"\.orbax-checkpoint-tmp|\.deleting$|\.tmp$")
_STEP = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """One restored step: its state, the JSON saved beside it, and a sentence for each entry that was passed over."""

    step: int
    state: Any
    data: Any
    skipped: tuple[str, ...]


class Checkpoints:
    """Save and restore the steps of one run.

    A step counts once its manifest is on the disk; whatever has none, or differs from it, is passed over and named.

    Args:
        folder: where the steps lie; a writer makes it.
        keep: newest verified steps that stay.
        writer: take the writer lock, clear what a killed writer left, and allow `save`. A reader changes nothing.

    Raises:
        WriterLockError: another process writes here.
        StorageError: the folder cannot be made or written.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
        ...     checkpoints.save(3, {"w": jnp.ones(2)}, {"position": 7})
        ...     checkpoints.wait()
        ...     checkpoints.restore({"w": jnp.zeros(2)}).data
        {'position': 7}
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, writer: bool = True):
        if keep < 1:
            raise ValueError(f"keep={keep}: wanted at least 1.")
        self.folder = Path(os.path.abspath(folder))  # Orbax fails on a relative one, and only in its save thread
        self.keep = keep
        self.writer = writer
        self.notes: list[str] = []
        self.saved_step: int | None = None
        self._manager: ocp.CheckpointManager | None = None
        self._thread: threading.Thread | None = None
        self._saving: int | None = None
        self._failure: BaseException | None = None
        self._lock: WriterLock | None = None
        if writer and is_primary():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = WriterLock(self.folder)
                self._clear_leftovers()
            except OSError as error:
                self.close()
                raise StorageError(f"cannot write checkpoints: {error}. Choose another --workdir.") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except StorageError as failure:
            if error is None:
                raise
            print(f"error: {failure}", file=sys.stderr)  # what ended the run is the error to report as such

    def save(self, step: int, state: Any, data: Any, *, must_be_finite: Any = None) -> None:
        """Begin to save `step`; the arrays may be donated as soon as this returns.

        It first waits for the former save. A step is safe only once `wait` returned or `saved_step` names it.

        Args:
            step: larger than every saved one.
            state: a pytree of arrays.
            data: what JSON can hold: the data position, its fingerprint and the like. The first process's is kept.
            must_be_finite: a pytree that is checked first, the parameters as a rule.

        Raises:
            StorageError: the former save failed, or this one could not begin.
            NonFiniteError: `must_be_finite` holds NaN or infinity; nothing is written.
            UsageError: a reader saves, or the step is not larger than the saved ones.
            TypeError: `data` is not JSON.
        """
        self.wait()
        if not self.writer:
            raise UsageError("these checkpoints were opened to be read: open them with writer=True to save.")
        if bad := nonfinite_leaves(must_be_finite):
            raise NonFiniteError(f"step {step} is not saved, these parameters are not finite: {', '.join(bad[:20])}.")
        try:
            json.dumps(data, allow_nan=False)
        except ValueError as error:
            raise TypeError(f"data must be plain JSON without NaN or infinity: {error}.") from error
        newest = max(self._steps(), default=-1)
        if step <= newest:
            raise UsageError(f"step {step} cannot be saved: {self.folder} holds step {newest}. Restore it, or move it.")
        leaves = leaf_table(state)
        try:
            if is_primary():
                replace_file(self.folder / _PENDING, json.dumps({"step": step}))
            arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"data": data}))
            # force: our own check above stands in for Orbax's, which skips a step without a word.
            self._get_manager().save(step, args=arguments, force=True)
        except Exception as error:
            self._recover()
            raise _save_failed(step, error) from error
        self._saving = step
        self._thread = threading.Thread(target=self._finish, args=(step, leaves), name=f"checkpoint-{step}")
        self._thread.start()

    def check(self) -> None:
        """Raise the failure of a background save as soon as it is known; cheap enough for every step.

        Raises:
            StorageError: the save failed.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Block until the running save is verified on the disk.

        Raises:
            StorageError: it failed; the steps before it are intact, and a later save may succeed.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if (failure := self._failure) is not None:
            self._failure = None
            self._recover()
            raise _save_failed(self._saving, failure) from failure

    def reached_preemption(self, step: int) -> bool:
        """Return whether the cluster asked this step, the same on every process, to be saved and be the last."""
        return ocp.utils.reached_preemption(step)

    def close(self) -> None:
        """Wait for the running save, then free the manager and the lock; a second call does nothing.

        Raises:
            StorageError: the running save failed.
        """
        try:
            self.wait()
        finally:
            self._drop_manager()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _finish(self, step: int, leaves: dict[str, Any]) -> None:
        try:
            self._get_manager().wait_until_finished()
            if is_primary():
                write_manifest(self.folder / str(step), step=step, leaves=leaves)
                (self.folder / _PENDING).unlink(missing_ok=True)
            self.saved_step = step
        except BaseException as error:  # raised again, in the thread of the caller, by `wait`
            self._failure = error
            return
        try:
            if is_primary():
                self._delete_old()
        except OSError as error:
            self.notes.append(f"older steps than {step} could not be deleted ({_short(error)}).")

    def _recover(self) -> None:
        """After a failed save: free its space and make Orbax forget it, so that a later save may succeed."""
        self._drop_manager()
        try:
            if is_primary():
                self._clear_leftovers()
        except OSError as error:
            self.notes.append(f"what the failed save left could not be removed ({_short(error)}).")

    def _delete_old(self) -> None:
        """Delete all but the newest verified steps, only ever after a newer one is on the disk."""
        verified = [step for step in self._steps() if self._has_manifest(step)]
        for step in verified[self.keep :]:
            # Renamed first: a kill in the middle leaves no half step under a step's name.
            doomed = self.folder / f"{step}.deleting"
            os.replace(self.folder / str(step), doomed)
            shutil.rmtree(doomed)

    def latest(self) -> int | None:
        """Return the newest step that passes its manifest, or None where no save ever finished.

        Raises:
            CheckpointCorruptError: there are steps, and none of them can be used.
        """
        found = self._newest_verified()
        return None if found is None else found[0]

    def restore(self, like: Any, *, step: int | None = None, partial: bool = False) -> Restored | None:
        """Restore the newest step that passes its manifest, passing over damaged ones; None where nothing was saved.

        A writer moves every newer entry to `set_aside/`, so that the run can save those steps again.

        Args:
            like: the tree wanted, of arrays or ShapeDtypeStructs; their shardings decide where the values go, also
                on another mesh than the one they were saved from.
            step: restore exactly this step.
            partial: `like` may lack leaves, for instance to read the parameters alone.

        Raises:
            CheckpointCorruptError: there are steps, and none of them can be used.
            CheckpointMismatchError: the step holds other leaves, shapes or dtypes; all are listed.
        """
        self.wait()
        unreadable: dict[int, str] = {}
        while (found := self._agreed_step(step, unreadable)) is not None:
            number, manifest, skipped = found
            check_leaves(manifest["leaves"], leaf_table(like), step=number, partial=partial)
            try:
                state, data = self._read(number, like, partial=partial)
            except Exception as error:
                gone = not (self.folder / str(number)).exists()
                unreadable[number] = "the writer deleted it" if gone else f"Orbax cannot read it ({_short(error)})"
                self._drop_manager()
                if jax.process_count() > 1:  # the others may have read it: no two may go on from two steps
                    raise CheckpointCorruptError(f"step {number} was passed over: {unreadable[number]}.") from error
                continue
            if self.writer and is_primary():
                self._set_aside_after(number)
            return Restored(step=number, state=state, data=data["data"], skipped=tuple(skipped))
        return None

    def _agreed_step(
        self, only: int | None, passed_over: Mapping[int, str]
    ) -> tuple[int, dict[str, Any], list[str]] | None:
        """As `_newest_verified`; of several processes the first one looks, and all take what it found."""
        if jax.process_count() == 1:
            return self._newest_verified(only=only, passed_over=passed_over)
        found, failure = None, None
        if is_primary():
            try:
                found = self._newest_verified(only=only, passed_over=passed_over)
            except CheckpointCorruptError as error:
                failure = error
        number = from_primary(-2 if failure else -1 if found is None else found[0])
        if number == -2:
            raise failure or CheckpointCorruptError(f"no checkpoint in {self.folder} can be used; process 0 says why.")
        if number == -1 or is_primary():
            return found
        return number, read_manifest(self.folder / str(number), step=number), []

    def _read(self, step: int, like: Any, *, partial: bool) -> tuple[Any, Any]:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        if partial:
            wanted: Any = ocp.args.PyTreeRestore(
                like, partial_restore=True, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
            )
        else:
            wanted = ocp.args.StandardRestore(like)
        arguments = ocp.args.Composite(state=wanted, data=ocp.args.JsonRestore())
        # A manager of its own: one manager must not see the state item with two handlers.
        options = ocp.CheckpointManagerOptions(create=False)
        with ocp.CheckpointManager(self.folder, options=options) as manager:
            restored = manager.restore(step, args=arguments)
        return restored["state"], restored["data"]

    def _newest_verified(
        self, *, only: int | None = None, passed_over: Mapping[int, str] | None = None
    ) -> tuple[int, dict[str, Any], list[str]] | None:
        reasons, damaged = self._strays(), False
        pending = self._pending_step()
        steps = self._steps()
        for step in steps if only is None else [only]:
            try:
                if passed_over and step in passed_over:
                    raise DamageError(passed_over[step])
                return step, verify(self.folder / str(step), step=step), reasons
            except (DamageError, OSError) as error:
                unfinished = step == pending and not self._has_manifest(step)
                damaged = damaged or not unfinished
                reasons.append(f"step {step} was passed over: {'its save is not finished' if unfinished else error}.")
        if damaged and not self.writer and steps != self._steps():
            # The writer deleted what we were reading, which it does only after a newer step is there.
            return self._newest_verified(only=only, passed_over=passed_over)
        if damaged:
            raise CheckpointCorruptError(
                f"no checkpoint in {self.folder} can be used.\n  " + "\n  ".join(reasons) + "\nBring back an intact "
                "copy, or move the folder away (or choose another --workdir) to start from the beginning."
            )
        return None

    def _steps(self) -> list[int]:
        """List everything that bears a step's name, newest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted((int(name) for name in names if _STEP.fullmatch(name)), reverse=True)

    def _strays(self) -> list[str]:
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        strays = [name for name in names if name not in _OWN and not _STEP.fullmatch(name)]
        return [f"{name} was passed over: it is not a step." for name in strays if not _UNFINISHED.search(name)]

    def _has_manifest(self, step: int) -> bool:
        try:
            read_manifest(self.folder / str(step), step=step)
        except (DamageError, OSError):
            return False
        return True

    def _pending_step(self) -> int | None:
        try:
            return json.loads((self.folder / _PENDING).read_text())["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _clear_leftovers(self) -> None:
        """Remove what a killed writer left half done; only the holder of the lock may."""
        pending = self._pending_step()
        for name in sorted(os.listdir(self.folder)):
            path = self.folder / name
            unfinished = name == str(pending) and not self._has_manifest(pending)
            if name in _OWN or not (_UNFINISHED.search(name) or unfinished):
                continue
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)
            self.notes.append(f"{name} was removed: a run left it half done.")
        (self.folder / _PENDING).unlink(missing_ok=True)

    def _set_aside_after(self, step: int) -> None:
        for newer in self._steps():
            if newer > step:
                place = self.folder / _SET_ASIDE
                place.mkdir(exist_ok=True)
                taken = len(os.listdir(place))
                os.replace(self.folder / str(newer), place / f"{newer}-{taken}")
                self.notes.append(f"step {newer} was moved to {_SET_ASIDE}/{newer}-{taken}.")

    def _get_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # Retention is ours: Orbax would delete the last good step before the new one has its manifest.
            options = ocp.CheckpointManagerOptions(max_to_keep=None, create=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _drop_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:  # the failure itself was raised by save or wait
                logging.debug("closing the checkpoint manager: %s", error)


def _save_failed(step: int | None, error: BaseException) -> StorageError:
    return StorageError(
        f"step {step} was not saved ({_short(error)}). The steps saved before it are intact: see to the disk's space "
        "and permissions, then run the same command again to resume."
    )


def _short(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    if len(text) > 300:  # the storage library nests paths first and says what happened last
        text = f"{text[:120]} ... {text[-160:]}"
    return f"{type(error).__name__}: {text}"
