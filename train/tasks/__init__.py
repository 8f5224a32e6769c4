"""The task table: name -> Task. Adding a task is one module and one row here."""

from train.tasks.arith import ARITH
from train.tasks.base import Example, Source, Task
from train.tasks.chartqa import CHARTQA
from train.tasks.clock import CLOCK
from train.tasks.gsm8k import GSM8K
from train.tasks.jsonl import JSONL
from train.tasks.svamp import SVAMP

TASKS: dict[str, Task] = {task.name: task for task in (ARITH, GSM8K, SVAMP, CLOCK, CHARTQA, JSONL)}

__all__ = ["TASKS", "Example", "Source", "Task"]
