"""The training loop: step after step, logged, evaluated by generating, checkpointed, and stopped in good order."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from train.assembly import Run, assemble
from train.checkpoint import Checkpoints
from train.compilation_cache import use_compilation_cache
from train.config import TrainConfig, check_run_folder, differences, save_config
from train.data import Batch, check_fingerprint
from train.environment import installed_versions, write_environment
from train.exits import NonFiniteError, StoppedError, StopSignals, UsageError
from train.log import EVALS, METRICS, PREDICTIONS, read_jsonl, write_jsonl
from train.parameters import check_frozen
from train.picture_sheet import write_picture_sheet
from train.preview import describe_step, header, show_examples
from train.processes import (
    AnyProcess,
    Watchdog,
    check_agreement,
    check_shared_folder,
    from_primary,
    is_primary,
    join_processes,
)
from train.progress import format_seconds
from train.prompts import PromptBatch
from train.records import Records, open_records
from train.report import closing_table, newest_predictions, sample_predictions, write_plots
from train.scoring import answer_prompts, grade_answers
from train.step import TrainState


def train(config: TrainConfig, argv: Sequence[str]) -> None:
    """Run the training that a config describes, from the beginning or from its newest checkpoint.

    Args:
      config: the whole run.
      argv: the command line, for `environment.json`.

    Raises:
      RunError: one of its classes, by cause; see `train.exits`.
    """
    join_processes(
        **{field: getattr(config, field) for field in ("distributed", "coordinator", "num_processes", "process_id")},
        join_timeout=config.join_timeout,
        peer_timeout=config.peer_timeout,
    )
    _check_platform(config)
    use_compilation_cache()
    resuming = check_run_folder(config)
    # The first run of a task makes its data, and a backbone may have to be converted.
    _announce("preparing data and model ...")
    began = time.monotonic()
    run = assemble(config)
    _announce(header(run, resuming=resuming, prepare_seconds=time.monotonic() - began))
    if config.dry_run:
        described = describe_step(run)
        _announce(f"{show_examples(run)}\n\n{described}")
        return
    check_agreement(_to_agree_on(run))
    folder = Path(config.workdir)
    with (
        StopSignals() as stop,
        Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints) as checkpoints,
        Watchdog(config.stall_timeout) as watchdog,
    ):
        check_shared_folder(folder / "checkpoints")
        # Once more, now that nobody else can write here: another process may have begun a run meanwhile.
        check_run_folder(config)
        state, saved = _first_state(run, checkpoints)
        start = saved or 0
        if start >= config.steps:
            _announce(f"nothing is left to train: all {config.steps} steps are done and saved")
        elif is_primary():
            save_config(config)
            write_environment(config.workdir, argv)
            run.tokenizer.save(config.workdir)
        resume_step = start if start > 0 else None
        with contextlib.ExitStack() as stack:
            records = open_records(stack, config, resume_step, initial=start)
            loop = _Loop(run, checkpoints, records, stop, watchdog, saved)
            loop.go(state, start)
            seconds = {"steps": records.progress.seconds, **records.progress.paused_seconds}
    if not is_primary():
        return
    write_plots(folder)
    write_picture_sheet(folder, config.task, (example for batch in run.prompts for example in batch.examples))
    print(sample_predictions(newest_predictions(folder)), flush=True)
    print(closing_table(read_jsonl(folder / METRICS), read_jsonl(folder / EVALS)), flush=True)
    if loop.steps_without_numbers:
        share = f"{loop.steps_without_numbers:,} of the {config.steps - start:,} steps of this start"
        print(f"{share} had no numeric target: there the numeric term was 0", flush=True)
    print("time of this start: " + ", ".join(f"{name} {format_seconds(s)}" for name, s in seconds.items()), flush=True)


def _announce(text: str) -> None:
    """Say something once, however many processes there are."""
    if is_primary():
        print(text, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _InFlight:
    """A step that was handed to the devices, with what belongs to its batch: the stream moves on meanwhile."""

    step: int
    metrics: dict[str, jax.Array]
    epoch: float
    examples: np.ndarray


class _Loop:
    """The loop's own bookkeeping: which step is in flight, which is saved, and when what is due.

    A due step is finished, logged, saved and then evaluated: a kill during an evaluation loses no training, and the
    next start makes up for the evaluation.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        records: Records,
        stop: StopSignals,
        watchdog: Watchdog,
        saved: int | None,
    ):
        self.run, self.checkpoints, self.records, self.stop = run, checkpoints, records, stop
        self.watchdog, self._any_process = watchdog, AnyProcess(run.mesh)
        self.config = run.config
        self.tokens_per_step = self.config.batch_size * self.config.max_length
        self._saved = saved
        self._in_flight: _InFlight | None = None
        self._input_wait = 0.0
        self.steps_without_numbers = 0
        self._programs: dict[tuple[tuple[int, ...], ...], jax.stages.Compiled] = {}

    def go(self, state: TrainState, start: int) -> None:
        """Run the steps that are left; the metrics of a step are read while the next one runs."""
        # The data position that belongs to `state`: the stream's after the batch of its last step.
        position = self.run.batches.get_state()
        self._evaluate_if_due(state, start, position)
        if start < self.config.steps:
            self._compiled(self.run.batches.blank())
            frozen = self.run.frozen
        for step in range(start + 1, self.config.steps + 1):
            if self._must_stop():
                self._stop(state, step - 1, position)
            began = time.monotonic()
            batch = self.run.place(next(self.run.batches))
            self._input_wait += time.monotonic() - began
            position = self.run.batches.get_state()
            state, metrics = self._compiled(batch)(state, batch, self.run.kernel, frozen)
            self._finish()
            self._in_flight = _InFlight(
                step=step, metrics=metrics, epoch=self.run.batches.epoch, examples=self.run.batches.examples
            )
            if self._is_last(step) or self._is_due(step):
                self._finish()
                if self._is_last(step) or self._every(self.config.checkpoint_every, step):
                    self._save(state, step, position)
                self._evaluate_if_due(state, step, position)
            self.checkpoints.check()
        self.checkpoints.wait()

    def _must_stop(self) -> bool:
        """Whether a signal came, to whichever process: all of them stop at the same place."""
        self.watchdog.progress()
        return self._any_process(self.stop.received is not None)

    def _compiled(self, batch: Batch) -> jax.stages.Compiled:
        """The program for the shapes of a batch; those of images differ by their room."""
        shapes = tuple(leaf.shape[1:] for leaf in jax.tree.leaves(batch))
        if shapes not in self._programs:
            with self.records.progress.pause("compile"):
                self._programs[shapes] = self.run.lower_step(batch).compile()
        return self._programs[shapes]

    def _is_last(self, step: int) -> bool:
        return step == self.config.steps

    def _is_due(self, step: int) -> bool:
        return self._every(self.config.eval_every, step) or self._every(self.config.checkpoint_every, step)

    @staticmethod
    def _every(interval: int, step: int) -> bool:
        return interval > 0 and step > 0 and step % interval == 0

    def _finish(self) -> None:
        """Wait for the step in flight; stop the run if it was not finite; write its row if it is a logged one."""
        if self._in_flight is None:
            return
        flight, self._in_flight = self._in_flight, None
        step = flight.step
        values = {name: value.item() for name, value in jax.device_get(flight.metrics).items()}
        progress = self.records.progress
        progress.advance(step, tokens=self.tokens_per_step)
        is_finite = values.pop("is_finite")
        if not (values["numeric_count"] or self.run.objective.is_plain):
            self._count_step_without_numbers(step)
        if is_finite and not (step == 1 or self._is_last(step) or self._every(self.config.log_every, step)):
            return
        row = {
            "step": step,
            "loss": values["loss"],
            "ce": values["ce"],
            "numeric": values.get("numeric"),
            "ce_count": values["ce_count"],
            "numeric_count": values["numeric_count"],
            "samples": values["samples"],
            "learning_rate": float(self.run.schedule(step - 1)),
            "grad_norm": values["grad_norm"],
            "tokens_per_second": progress.tokens_per_second,
            "input_wait": self._input_wait / progress.seconds if progress.seconds > 0 else None,
            "compile_seconds": progress.paused_seconds.get("compile"),
            "epoch": flight.epoch,
        }
        if not is_finite:
            row["examples"] = np.unique(flight.examples[flight.examples >= 0]).tolist()
        self.records.write(self.records.metrics, row, "train")
        if not is_finite:
            raise NonFiniteError(
                f"the loss or the gradient of step {step} is not finite (loss {values['loss']}, gradient norm "
                f"{values['grad_norm']}); the step was not applied, and its examples stand in {METRICS}. Start a run "
                "with a smaller --learning_rate or --loss_weight, or with --clip_norm, in another --workdir; the same "
                "command resumes from the newest checkpoint."
            )
        shown = {name: row[name] for name in ("loss", "ce", "numeric") if row[name] is not None}
        progress.show(shown)

    def _count_step_without_numbers(self, step: int) -> None:
        self.steps_without_numbers += 1
        if self.steps_without_numbers == 1:
            self.records.progress.say(
                f"note: none of the targets of step {step} is a number, so its numeric term is 0; such steps are "
                "counted, and their number is given at the end. Larger batches have fewer of them."
            )

    def _evaluate_if_due(self, state: TrainState, step: int, position: dict[str, Any]) -> None:
        split = self.config.eval_split or self.run.task.eval_split
        due = self._is_last(step) or self._every(self.config.eval_every, step)
        # What pretrained weights can do before the first step is what a run of them is compared with.
        due = due or (step == 0 and self.run.is_pretrained)
        if not due:
            return
        evals = self.records.evals
        if not from_primary(evals is not None and not evals.has(step=step, split=split)):
            return
        with self.records.progress.pause("evaluate"):
            prompts = self._until_stopped(state, step, position)
            task = self.run.task
            answers = answer_prompts(
                self.run.model(state.parameters),
                self.run.tokenizer,
                prompts,
                max_new_tokens=task.max_new_tokens,
                mesh=self.run.mesh,
            )
            scored = grade_answers(answers, task.grader)
            if is_primary():
                write_jsonl(Path(self.config.workdir) / PREDICTIONS / f"{step}.jsonl", scored.predictions)
            row = {"step": step, "split": split, **dataclasses.asdict(scored.metrics)}
            self.records.write(self.records.evals, row, f"eval/{split}")
        low, high = scored.metrics.accuracy_low, scored.metrics.accuracy_high
        self.records.progress.say(
            f"step {step}: {split} accuracy {scored.metrics.accuracy:.1%} ({low:.1%} to {high:.1%}), "
            f"{scored.metrics.n} examples"
        )

    def _until_stopped(self, state: TrainState, step: int, position: dict[str, Any]) -> Iterator[PromptBatch]:
        """Yield the prompts, and end the run between two batches of them: an evaluation may outlast a grace period."""
        for batch in self.run.prompts:
            if self._must_stop():
                self._stop(state, step, position)
            yield batch

    def _save(self, state: TrainState, step: int, position: dict[str, Any]) -> None:
        if self._saved == step:
            return
        with self.records.progress.pause("checkpoint"):
            data = {
                "position": position,
                "fingerprint": self.run.batches.fingerprint,
                "circumstances": _circumstances(self.run),
                "frozen": self.run.parameters.fingerprint,
            }
            self.checkpoints.save(step, state, data, must_be_finite=state.parameters)
        self._saved = step

    def _stop(self, state: TrainState, step: int, position: dict[str, Any]) -> NoReturn:
        self._finish()
        self._save(state, step, position)
        self.checkpoints.wait()
        raise StoppedError(
            f"a signal ended the run; step {step} is saved and verified. Run the same command again to go on.",
            self.stop.received or signal.SIGTERM,
        )


def _first_state(run: Run, checkpoints: Checkpoints) -> tuple[TrainState, int | None]:
    """Give the state to go on from and the saved step it is, None for a fresh one."""
    restored = checkpoints.restore(run.state_like)
    for note in checkpoints.notes:
        _announce(f"note: {note}")
    if restored is None:
        return run.make_state(), None
    for reason in restored.skipped:
        _announce(f"note: {reason}")
    if restored.step > run.config.steps:
        raise UsageError(
            f"{run.config.workdir} holds step {restored.step} and --steps={run.config.steps} asks for fewer: give at "
            f"least {restored.step}, or another --workdir to start a new run."
        )
    check_frozen(restored.data.get("frozen"), run.parameters.fingerprint, run.config.backbone)
    changes = check_fingerprint(
        restored.data["fingerprint"], run.batches.fingerprint, allow_change=run.config.allow_data_change
    )
    for line in changes:
        _announce(f"note: the data changed: {line}")
    run.batches.set_state(restored.data["position"], allow_change=bool(changes))
    for line in differences(restored.data["circumstances"], _circumstances(run)):
        _announce(f"note: {line}: the run goes on from the same state, but not bitwise as it would have")
    _announce(f"resumed from step {restored.step}")
    return restored.state, restored.step


def _circumstances(run: Run) -> dict[str, Any]:
    """What a resumed run may change, but not without changing rounding or the learning rate."""
    circumstances = {
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "devices": {axis: size for axis, size in run.mesh.shape.items() if size > 1},
    }
    if jax.process_count() > 1:
        circumstances["processes"] = jax.process_count()
    if run.objective.logits != "dense":
        circumstances["logits"] = run.objective.logits
    if run.config.schedule == "constant":
        return circumstances
    return {**circumstances, "steps of the schedule": run.config.steps}


def _to_agree_on(run: Run) -> dict[str, Any]:
    """What must be the same in all processes, or each would train on something else."""
    own = {"process_id", "coordinator", "debug"}
    config = {name: value for name, value in dataclasses.asdict(run.config).items() if name not in own}
    return {
        **{f"--{name}": value for name, value in config.items()},
        "the data": run.batches.fingerprint,
        "the weights": run.parameters.fingerprint,
        "installed versions": installed_versions(),
        "kind of devices": jax.local_devices()[0].device_kind,
    }


def _check_platform(config: TrainConfig) -> None:
    try:
        found = jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names one that is not here
        raise UsageError(f"jax finds no devices: {error}") from error
    if config.platform and config.platform != found:
        raise UsageError(
            f"--platform={config.platform} was asked for and jax runs on {found}: install the extra for it (tpu, "
            "cuda12, cuda13), see why it was not found with JAX_PLATFORMS, or leave the flag out."
        )
