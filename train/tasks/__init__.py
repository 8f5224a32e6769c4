"""The task table: name -> Task. Adding a task is one module and one row here."""

from train.tasks.arith import ARITH
from train.tasks.base import Example, Source, Task

TASKS: dict[str, Task] = {task.name: task for task in (ARITH,)}

__all__ = ["TASKS", "Example", "Source", "Task"]
