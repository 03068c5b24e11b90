"""What a server can ask of a client: one file for each task, with its message, its handler and its collector."""

from fl_elastic.flower.tasks.task import Answer, RoundTask, task_in

__all__ = ["Answer", "RoundTask", "task_in"]
