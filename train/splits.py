"""The one place where a config opens a split of its task's data, and where it may keep what it makes of them."""

from typing import Any

from train.config import TrainConfig
from train.exits import UsageError
from train.tasks import TASKS, Source
from train.tasks.prepared import default_data_dir

# Field of the config -> what `make_source` calls it.
_OPTIONS = {"data_seed": "seed", "limit": "limit", "max_bad_lines": "max_bad_lines"}


def open_split(config: TrainConfig, split: str) -> Source:
    """Open a split of the task that a config names, in its variant and with its options.

    Args:
      config: task, variant, data_dir, data_seed, limit (of the training split) and max_bad_lines are read.
      split: one of the task's.

    Raises:
      UsageError: a variant that the task does not have.
      DataError: data that are missing or cannot be used.
    """
    task = TASKS[config.task]
    if config.variant and config.variant not in task.variants:
        raise UsageError(f"variant={config.variant}: task {config.task} has {', '.join(task.variants)}.")
    options: dict[str, Any] = {"variant": config.variant} if config.variant else {}
    for field, name in _OPTIONS.items():
        if task.has_option(field, config.variant):
            options[name] = getattr(config, field)
    if "limit" in options and (split != task.train_split or not options["limit"]):
        del options["limit"]
    return task.make_source(split, data_dir=config.data_dir or None, **options)


def cache_folder(config: TrainConfig) -> str:
    """Give the folder for what is made of the data: the user's cache where --data_dir holds files of the user's."""
    if TASKS[config.task].takes_files(config.variant):
        return default_data_dir()
    return config.data_dir or default_data_dir()
